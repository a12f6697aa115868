"""The thread of a llama.cpp model for embeddings: the texts of all jobs, as many at once as fit one computation.

A text is computed whole, and leaves nothing behind: there is no cache to plan for, as there is in `llama_batch`.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from citadel.engine import EmbedJob, EngineInfo
from citadel.errors import EdgeError
from engines import embedding, llama_files
from engines.llama_context import Batch, make_context
from engines.llama_native import NativeError, Team, assign, freed_with, lib
from engines.llama_worker import Begin, Duty, Happened, Ready, Worker

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray

    from citadel.engine import Placement
    from engines.llama_native import Model
    from engines.llama_options import Settings

_AT_ONCE: Final = 64
"""Texts in one computation, at most."""
_POOLED: Final = (lib.LLAMA_POOLING_TYPE_MEAN, lib.LLAMA_POOLING_TYPE_CLS, lib.LLAMA_POOLING_TYPE_LAST)


class EmbedWorker(Worker):
    @contextmanager
    def _opened(
        self, settings: Settings, weights: llama_files.Weights, model: Model, placement: Placement
    ) -> Generator[tuple[Duty, Ready], None, None]:
        length = llama_files.context_length(self._spec, weights)
        context = EmbedContext(model, settings.context, llama_files.computed(self._spec, settings, weights))
        try:
            length, fingerprint = min(length, context.size), weights.fingerprint(self._engine)
            info = EngineInfo(length, self._spec.slots, fingerprint, placement=placement)
            yield Embedder(context), Ready(info, model.vocabulary, None)
        finally:
            context.close()


class EmbedContext:
    """llama.cpp's context that makes a vector of each sequence."""

    def __init__(self, model: Model, settings: Mapping[str, Any], size: int) -> None:
        """`settings` are fields of llama_context_params; `size`: tokens of one computation."""
        params = lib.llama_context_default_params()
        assign(params, settings)
        params.n_ctx = params.n_batch = params.n_ubatch = size
        params.n_seq_max = _AT_ONCE
        params.kv_unified = True
        params.embeddings = True
        self._handle = handle = make_context(model, params)
        self._free = freed_with(self, lib.llama_free, handle)
        self.team = Team(handle)
        if lib.llama_pooling_type(handle) not in _POOLED:
            self.close()
            raise NativeError("the file does not say how a text's vector is made of its tokens'; set pooling")
        self._memory = lib.llama_get_memory(handle)
        self._vocabulary = model.vocabulary
        self._width = int(lib.llama_model_n_embd_out(model.handle))
        self.size = min(size, int(lib.llama_n_ubatch(handle)), int(lib.llama_n_batch(handle)))
        self._batch = Batch(self.size)

    def close(self) -> None:
        self.team.rest()
        self._free()

    def vectors(self, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Of `_AT_ONCE` texts at most, which together have no more than `size` tokens."""
        batch = self._batch
        batch.clear()
        for sequence, text in enumerate(texts):
            batch.add(sequence, 0, text, outputs=len(text))
        batch.check(self.size, _AT_ONCE, self._vocabulary.size)
        self.team.work()
        code = int(lib.llama_decode(self._handle, batch.struct))
        if code != 0:
            raise NativeError(f"llama_decode failed with code {code}")
        found = [self._vector(sequence) for sequence in range(len(texts))]
        if self._memory:
            lib.llama_memory_clear(self._memory, False)
        return found

    def _vector(self, sequence: int) -> NDArray[np.float32]:
        address = lib.llama_get_embeddings_seq(self._handle, sequence)
        if not address:
            raise NativeError(f"there is no vector of sequence {sequence}")
        return np.ctypeslib.as_array(address, shape=(self._width,)).copy()


class _Task:
    def __init__(self, job: EmbedJob) -> None:
        self.job = job
        self.made = 0


class Embedder:
    """`Duty`: a step takes texts of all jobs in turn, as many as fit."""

    def __init__(self, context: EmbedContext) -> None:
        self.tasks: dict[str, _Task] = {}
        self.news: list[Happened] = []
        self.team = context.team
        self._context = context

    def begin(self, order: Begin) -> None:
        assert isinstance(order.job, EmbedJob)
        self.tasks[order.job.id] = _Task(order.job)

    def abort(self, job_id: str) -> None:
        if self.tasks.pop(job_id, None):
            self.news.append(Happened(job_id, over=True))

    def step(self) -> None:
        chosen = self._choose()
        vectors = self._context.vectors([text for _, text in chosen])
        for (task, _), values in zip(chosen, vectors, strict=True):
            if task.job.id in self.tasks:  # it may have failed with a text before
                self._take(task, values)

    def _take(self, task: _Task, values: NDArray[np.float32]) -> None:
        job = task.job
        try:
            vector = embedding.unit(values)
        except EdgeError as error:
            del self.tasks[job.id]
            self.news.append(Happened(job.id, error=error, over=True))
            return
        task.made += 1
        over = task.made == len(job.texts)
        if over:
            del self.tasks[job.id]
        self.news.append(Happened(job.id, vector, over=over))

    def _choose(self) -> list[tuple[_Task, Sequence[int]]]:
        """The next texts of each job, job by job in turn; the job that was first is last the next time."""
        first = next(iter(self.tasks))
        turns = deque((task, task.made) for task in self.tasks.values())
        self.tasks[first] = self.tasks.pop(first)
        chosen: list[tuple[_Task, Sequence[int]]] = []
        room = self._context.size
        while turns and len(chosen) < _AT_ONCE:
            task, at = turns.popleft()
            text = task.job.texts[at]
            if len(text) <= room:
                room -= len(text)
                chosen.append((task, text))
                if at + 1 < len(task.job.texts):
                    turns.append((task, at + 1))
        return chosen
