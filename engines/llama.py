"""llama.cpp in this process, through llama-cpp-python's C interface.

    llama.py           the adapter, and the engine as the event loop sees it
    llama_worker.py    the thread that owns the model: load, decode for all jobs together, free
    llama_embed.py     the thread of a model for embeddings
    llama_batch.py     which sequence computes what next (pure), in the words of llama_step.py; llama_draft.py guesses
    llama_cache.py     the prompts that lost their place
    llama_sampling.py  a token from logits; llama_grammar.py, llama_text.py beside it
    llama_native.py    llama.cpp's model, llama_context.py its compute, guarded against what would abort the process
    openmp.py          how long the threads that compute spin, and how models share the cores
    llama_files.py     what a model's files are; llama_options.py the keys of models.toml
    llama_room.py      what a load takes and where its weights go; strata.py says which files plan that

A job goes to the thread as an order; its pieces come back, once per decode for all jobs, into the job's own mailbox,
which grows when nobody reads it. Closing a job's generator sends an order too, and waits for the thread to say that it
is done with the job.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from citadel.engine import Piece
from citadel.errors import BadRequest, CitadelError, ContextLengthExceeded, EngineRestarted, LlmUnavailable
from engines import embedding, llama_room
from engines.llama_embed import EmbedWorker
from engines.llama_log import log
from engines.llama_text import Tokenizer
from engines.llama_worker import Abort, Begin, Ended, Ready, Worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from citadel.engine import EmbedJob, EngineInfo, EngineSpec, Job, Need, Progress, Sampling, Vector
    from engines.llama_worker import Happened, News


class Llama:
    """The adapter."""

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        return llama_room.need(spec, "llama")

    @staticmethod
    def open_tokenizer(spec: EngineSpec) -> Tokenizer:
        return Tokenizer(spec)

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> LlamaEngine:
        return await loaded_engine(spec, progress, "llama")


async def loaded_engine(spec: EngineSpec, progress: Progress, name: str) -> LlamaEngine:
    """`name` says which of the two engines on llama.cpp it is."""
    engine = LlamaEngine(spec, progress, name)
    try:
        await engine.loaded()
    except BaseException:
        await engine.close()
        raise
    return engine


class _Flight:
    """A running job, on the event loop's side. `over`: the thread no longer works on it."""

    def __init__(self) -> None:
        self.mailbox: asyncio.Queue[Piece | Vector | CitadelError] = asyncio.Queue()
        self.over = asyncio.Event()

    async def next(self) -> Piece | Vector:
        """What the thread made next; raises its error."""
        item = await self.mailbox.get()
        if isinstance(item, CitadelError):
            raise item
        return item


class LlamaEngine:
    """One loaded model."""

    def __init__(self, spec: EngineSpec, progress: Progress, name: str) -> None:
        self._model = spec.model
        self._loop = asyncio.get_running_loop()
        self._flights: dict[str, _Flight] = {}
        self._dead: str | None = None
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        # Who cancelled the load does not ask why it then failed.
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._ended = asyncio.Event()
        worker = EmbedWorker if spec.task == "embed" else Worker
        self._worker = worker(spec, progress, self._tell, name)
        self._worker.start()

    @property
    def info(self) -> EngineInfo:
        return self._ready.result().info

    @property
    def dead(self) -> str | None:
        return self._dead

    async def loaded(self) -> None:
        await asyncio.shield(self._ready)

    async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
        self._check_alive()
        ready = self._ready.result()
        if ready.grammars is None:
            raise BadRequest(f"{self._model} makes embeddings and no text")
        _check_job(job, ready)
        matcher = await asyncio.to_thread(ready.grammars.compile, job.grammar) if job.grammar is not None else None
        async with self._flying(Begin(job, matcher)) as flight:
            while True:
                piece = await flight.next()
                assert isinstance(piece, Piece)
                yield piece
                if piece.finish:
                    return

    async def embed(self, job: EmbedJob) -> AsyncGenerator[Vector, None]:
        self._check_alive()
        ready = self._ready.result()
        if ready.grammars is not None:
            raise BadRequest(f"{self._model} makes text and no embeddings")
        embedding.check(job, ready.info.context_length, ready.vocabulary.size)
        async with self._flying(Begin(job)) as flight:
            for _ in job.texts:
                vector = await flight.next()
                assert not isinstance(vector, Piece)
                yield vector

    async def close(self) -> None:
        self._die("it was unloaded")
        self._worker.cancel()
        await _until(self._ended)
        await asyncio.to_thread(self._worker.join)

    @asynccontextmanager
    async def _flying(self, order: Begin) -> AsyncGenerator[_Flight]:
        job_id = order.job.id
        self._check_alive()
        if job_id in self._flights:
            raise BadRequest(f"A job {job_id!r} is running already")
        flight = self._flights[job_id] = _Flight()
        self._worker.orders.put(order)
        try:
            yield flight
        finally:
            await self._settle(job_id, flight)

    async def _settle(self, job_id: str, flight: _Flight) -> None:
        """Returns when the thread is done with the job, also if this is cancelled meanwhile."""
        if not flight.over.is_set():
            self._worker.orders.put(Abort(job_id))
        await _until(flight.over)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineRestarted(self._model, self._dead)

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason
        for flight in self._flights.values():
            flight.mailbox.put_nowait(EngineRestarted(self._model, self._dead))
            flight.over.set()
        self._flights.clear()

    # What the thread tells.

    def _tell(self, news: News) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hear, news)
        except RuntimeError:
            # The event loop is closed: nobody is left to tell, and no close() will come.
            self._worker.cancel()

    def _hear(self, news: News) -> None:
        if isinstance(news, Ready):
            if not self._ready.done():
                self._ready.set_result(news)
        elif isinstance(news, Ended):
            self._end(news.error)
        else:
            for happened in news:
                self._deliver(happened)

    def _deliver(self, happened: Happened) -> None:
        flight = self._flights.get(happened.job_id)
        if flight is None:
            return
        item = happened.error if happened.made is None else happened.made
        if item is not None:
            flight.mailbox.put_nowait(item)
        if happened.over:
            del self._flights[happened.job_id]
            flight.over.set()

    def _end(self, error: Exception | None) -> None:
        if not self._ready.done():
            if error is None:
                self._ready.cancel()
            else:
                self._ready.set_exception(_failure(self._model, error))
        elif error is not None:
            log.error("the engine of %s died", self._model, exc_info=error)
        self._die(str(error) if error else "it was unloaded")
        self._ended.set()


async def _until(event: asyncio.Event) -> None:
    """Waits to the end even if cancelled, and is cancelled then."""
    cancelled: asyncio.CancelledError | None = None
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def _failure(model: str, error: Exception) -> LlmUnavailable:
    if isinstance(error, LlmUnavailable):
        return error
    log.error("the load of %s failed", model, exc_info=error)
    return LlmUnavailable(model, f"{type(error).__name__}: {error}")


def _check_job(job: Job, ready: Ready) -> None:
    size = ready.vocabulary.size
    if not job.prompt:
        raise BadRequest("The prompt is empty", param="messages")
    if min(job.prompt) < 0 or max(job.prompt) >= size:
        raise BadRequest(f"The prompt has a token that is not in the vocabulary of {size}", param="messages")
    if len(job.prompt) >= ready.info.context_length:
        raise ContextLengthExceeded(ready.info.context_length, len(job.prompt))
    _check_sampling(job.sampling, size)


def _check_sampling(sampling: Sampling, size: int) -> None:
    refusals = {
        "max_tokens": sampling.max_tokens < 1,
        "temperature": not 0 <= sampling.temperature < math.inf,
        "top_p": not 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k < 0,
        "min_p": not 0 <= sampling.min_p <= 1,
        "presence_penalty": not math.isfinite(sampling.presence_penalty),
        "frequency_penalty": not math.isfinite(sampling.frequency_penalty),
        "repetition_penalty": not 0 < sampling.repetition_penalty < math.inf,
        "logit_bias": not all(0 <= t < size and math.isfinite(b) for t, b in sampling.logit_bias.items()),
        "min_tokens": sampling.min_tokens < 0,
        "stop_token_ids": not all(0 <= token < size for token in sampling.stop_token_ids),
        "logprobs": sampling.logprobs is not None and sampling.logprobs < 0,
    }
    for name, refused in refusals.items():
        if refused:
            raise BadRequest(f"{name} is out of range", param=name)
