"""The thread that owns a loaded model: it loads it, decodes for all jobs together, and frees it.

Orders come in through a queue, looked at between two decodes. What happened goes out once per decode, as one call on
the event loop. Nothing else touches llama.cpp's context, so nothing here is locked.
"""

from __future__ import annotations

import queue
import threading
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from citadel.engine import EngineInfo, Job, Piece
from citadel.errors import CitadelError, EdgeError, LlmUnavailable
from engines import llama_files, llama_room, plan_rates
from engines.llama_batch import Planner
from engines.llama_cache import Archive
from engines.llama_context import Batch, Context
from engines.llama_draft import DRAFTING
from engines.llama_grammar import Grammars, Matcher
from engines.llama_log import log
from engines.llama_native import Model, NativeError, trim_heap
from engines.llama_options import Settings, settings_of
from engines.llama_placing import Placing
from engines.llama_sampling import Chooser
from engines.llama_session import Sessions
from engines.llama_step import GoBack, Limits, Restore, Rewind, Run, Save, Share, Truncate
from engines.llama_text import Text
from engines.plan_cost import forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from citadel.engine import EmbedJob, EngineFinish, EngineSpec, Placement, Progress, Vector
    from engines.llama_native import Team, Vocabulary
    from engines.llama_sampling import Choice
    from engines.llama_step import Step, Work

_LOADED_WEIGHTS = 0.95
"""The progress that the weights are; making the context is the rest."""


@dataclass(frozen=True, slots=True)
class Begin:
    job: Job | EmbedJob
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    job_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Happened:
    """What was made for a job, its error, or neither; when `over`, the thread no longer works on it."""

    job_id: str
    made: Piece | Vector | None = None
    error: CitadelError | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """`grammars`: of a model that generates."""

    info: EngineInfo
    vocabulary: Vocabulary
    grammars: Grammars | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The thread's last word: everything is freed. `error` is why, unless it was told to stop."""

    error: Exception | None


News = Ready | Ended | list[Happened]


class _Task:
    """A job on the thread."""

    def __init__(self, job: Job, matcher: Matcher | None, vocabulary: Vocabulary, context_length: int) -> None:
        sampling = job.sampling
        self.job = job
        self.chooser = Chooser(sampling, job.prompt, vocabulary, matcher)
        self.text = Text()
        self.left = min(sampling.max_tokens, context_length - len(job.prompt))
        self.run = Run(job.id, array("i", job.prompt), most=len(job.prompt) + self.left)
        self._vocabulary = vocabulary

    def take(self, choice: Choice) -> Piece:
        """The piece that a choice makes; with `finish` when the job is over."""
        token = choice.token
        if token is None:
            return self.last("stop")
        self.left -= 1
        logprobs = (choice.logprob,) if choice.logprob else ()
        if self.chooser.stops_at(token):
            return Piece(self.text.rest(), (token,), self._cached, logprobs, "stop")
        text = self.text.add(self._vocabulary.piece(token))
        finish: EngineFinish | None = "stop" if self.chooser.complete else "length" if self.left <= 0 else None
        if finish:
            text += self.text.rest()
        self.run.tokens.append(token)
        return Piece(text, (token,), self._cached, logprobs, finish)

    def last(self, finish: EngineFinish) -> Piece:
        return Piece(self.text.rest(), (), self._cached, (), finish)

    @property
    def _cached(self) -> int:
        return self.run.cached or 0


class Duty(Protocol):
    """What the thread does between two orders: `step()` computes once for all tasks; `news` is what came of it."""

    news: list[Happened]
    team: Team

    @property
    def tasks(self) -> Mapping[str, Any]: ...

    def begin(self, order: Begin) -> None: ...

    def abort(self, job_id: str) -> None: ...

    def step(self) -> None: ...


class Worker(threading.Thread):
    def __init__(self, spec: EngineSpec, progress: Progress, tell: Callable[[News], None], engine: str) -> None:
        """`tell` is called on this thread and must not block. `engine` is llama or strata. `start()` begins to load."""
        super().__init__(name=f"{engine} {spec.model}", daemon=True)
        self._engine = engine
        self.orders: queue.SimpleQueue[Begin | Abort | Stop] = queue.SimpleQueue()
        self._spec = spec
        self._progress = progress
        self._tell = tell
        self._cancelled = False
        self._reached = 0.0

    def cancel(self) -> None:
        """Ends the load, or the work after it, soon. May be called from any thread."""
        self._cancelled = True
        self.orders.put(Stop())

    def run(self) -> None:
        error: Exception | None = None
        try:
            self._live()
        except Exception as caught:  # noqa: BLE001 - whatever ends this thread, the event loop must hear of it
            error = caught
        trim_heap()
        self._tell(Ended(error))

    def _live(self) -> None:
        settings = settings_of(self._spec, self._engine)
        weights = llama_files.Weights(self._spec)
        weights.check_complete(self._spec)
        placing = Placing(llama_room.plan_of(self._spec, settings, weights), settings)
        model = None
        try:
            self._report(0.0)
            model = Model.load(weights.path, {**settings.model, **placing.fields}, self._go_on)
            if not model.generates_text:
                raise LlmUnavailable(self._spec.model, f"a {model.architecture} model does not generate text")
            with self._opened(settings, weights, model, self._placement(placing, model, weights)) as (work, ready):
                if self._cancelled:
                    return
                self._report(1.0)
                self._tell(ready)
                self._serve(work)
        except NativeError as error:
            raise LlmUnavailable(self._spec.model, str(error)) from None
        finally:
            if model:
                model.close()

    def _placement(self, placing: Placing, model: Model, weights: llama_files.Weights) -> Placement:
        rates = plan_rates.load(self._spec.data_dir)
        return placing.placement(model, weights.table, forecast(placing.plan, rates).tokens_per_s)

    @contextmanager
    def _opened(
        self, settings: Settings, weights: llama_files.Weights, model: Model, placement: Placement
    ) -> Generator[tuple[Duty, Ready], None, None]:
        """What this thread is for, with all that it takes beside the model."""
        context = _make_context(self._spec, settings, weights, model)
        grammars = None
        try:
            grammars = Grammars(model.vocabulary)
            info = _info(self._spec, self._engine, weights, context, placement)
            decoder = Decoder(context, model.vocabulary, info.context_length, settings)
            sessions = Sessions(self._spec, settings, info.fingerprint)
            sessions.restore(decoder.planner)
            yield decoder, Ready(info, model.vocabulary, grammars)
            sessions.keep(decoder.planner, context)
        finally:
            if grammars:
                grammars.close()
            context.close()

    def _go_on(self, fraction: float) -> bool:
        self._report(fraction * _LOADED_WEIGHTS)
        return not self._cancelled

    def _report(self, fraction: float) -> None:
        self._reached = max(self._reached, min(1.0, fraction))
        self._progress(self._reached)

    def _serve(self, work: Duty) -> None:
        while self._take_orders(work):
            if work.tasks:
                work.step()
            if work.news:
                self._tell(work.news)
                work.news = []

    def _take_orders(self, work: Duty) -> bool:
        """Waits for an order where there is nothing to do; False when told to stop."""
        if wait := not work.tasks:
            work.team.rest()
        while True:
            try:
                order = self.orders.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(order, Stop):
                return False
            if isinstance(order, Begin):
                work.begin(order)
            else:
                work.abort(order.job_id)


class Decoder:
    """`Duty`: all jobs of one context. A step decodes once for all of them."""

    def __init__(self, context: Context, vocabulary: Vocabulary, context_length: int, settings: Settings) -> None:
        prompt = min(settings.context["n_ubatch"], context.batch_size)
        limits = Limits(
            sequences=context.sequences,
            cells=settings.cells or context.cells,
            batch=context.batch_size,
            prompt=prompt,
            prompt_beside=min(settings.prompt_beside, prompt),
            trim=context.can_trim,
            window=context.window,
            share=context.can_share,
            copied=context.copied,
            draft=settings.draft,
            ngram=settings.ngram,
        )
        self.tasks: dict[str, _Task] = {}
        self.news: list[Happened] = []
        self.team = context.team
        self.planner = Planner(limits, Archive(settings.prompt_cache))
        self._context = context
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._batch = Batch(context.batch_size)

    def begin(self, order: Begin) -> None:
        assert isinstance(order.job, Job)
        task = _Task(order.job, order.matcher, self._vocabulary, self._context_length)
        self.tasks[order.job.id] = task
        self.planner.add(task.run)

    def abort(self, job_id: str) -> None:
        task = self.tasks.get(job_id)
        if task:
            self._end(task)
            self.news.append(Happened(job_id, over=True))

    def step(self) -> None:
        step = self.planner.plan()
        if not self._move(step):
            return
        if step.full:
            task = self.tasks[step.full.id]
            self._end(task)
            self.news.append(Happened(task.job.id, task.last("length"), over=True))
            return
        self._fill(step)
        code = self._context.decode(self._batch)
        if code == 1:
            log.warning("llama.cpp has less room than %d cells", self.planner.capacity)
            self.planner.refused(step)
            return
        if code != 0:
            raise NativeError(f"llama_decode failed with code {code}")
        self.planner.done(step)
        for work in step.work:
            if work.checkpoint:
                self.planner.archive.fill(work.checkpoint, self._context.checkpoint(work.sequence))
        self._choose([work for work in step.work if work.last])

    def _move(self, step: Step) -> bool:
        """False where a copy could not be brought back: then the step is not to be computed."""
        lost: dict[int, Restore | GoBack] = {}
        for move in step.moves:
            match move:
                case Share(source, target, length):
                    self._context.share(source, target, length)
                case Truncate(sequence, length):
                    # What is lost is empty already, and may be of a kind that can only be emptied.
                    self._context.truncate(sequence, 0 if sequence in lost else length)
                case Rewind():
                    self._context.rewind()
                case Save(sequence, saved):
                    self.planner.archive.fill(saved, self._context.save(sequence))
                case Restore() | GoBack():
                    if move.sequence not in lost and not self._bring_back(move):
                        lost[move.sequence] = move
        for move in lost.values():
            self.planner.lost(move)
        return not lost

    def _bring_back(self, move: Restore | GoBack) -> bool:
        copy = move.saved if isinstance(move, Restore) else move.checkpoint
        if copy.data is None:
            self._context.truncate(move.sequence, 0)
            return False
        if isinstance(move, Restore):
            return self._context.restore(move.sequence, copy.data)
        return self._context.go_back(move.sequence, copy.data, move.checkpoint.length)

    def _fill(self, step: Step) -> None:
        self._batch.clear()
        for work in step.work:
            self._batch.add(work.sequence, work.start, work.tokens, outputs=work.outputs)

    def _choose(self, works: list[Work]) -> None:
        """The next tokens of each task that has nothing left to compute, in the order of the batch's outputs."""
        if not works:
            return
        logits = self._context.logits()
        first = 0
        for work in works:
            self._advance(self.tasks[work.run.id], work.draft, logits, first)
            first += work.outputs

    def _advance(self, task: _Task, draft: array[int], logits: NDArray[np.float32], first: int) -> None:
        """Chooses a token from each row of `logits` from `first` on, until one is not what was guessed.

        So each is chosen from the logits, and with the draw, that it would have had without a guess.
        """
        for row, guessed in enumerate((*draft, None), first):
            try:
                choice = task.chooser.choose(logits[row], lambda chain, row=row: self._context.draw(chain, row))
                piece = task.take(choice)
            except EdgeError as error:
                self._end(task)
                self.news.append(Happened(task.job.id, error=error, over=True))
                return
            self.news.append(Happened(task.job.id, piece, over=piece.finish is not None))
            if piece.finish:
                self._end(task)
                return
            if choice.token != guessed:
                return

    def _end(self, task: _Task) -> None:
        self.planner.drop(task.run)
        task.chooser.close()
        del self.tasks[task.job.id]


def _make_context(spec: EngineSpec, settings: Settings, weights: llama_files.Weights, model: Model) -> Context:
    wanted = llama_files.cells(spec, settings, weights)
    context = Context(model, {**settings.context, "n_ctx": wanted}, spec.slots, spec.slots + DRAFTING * settings.draft)
    if settings.draft and not context.can_trim:
        context.close()
        reason = f"the memory of a {model.architecture} model can't be cut back, which 'speculative' needs"
        raise LlmUnavailable(spec.model, reason)
    return context


def _info(
    spec: EngineSpec, engine: str, weights: llama_files.Weights, context: Context, placement: Placement
) -> EngineInfo:
    length = min(llama_files.context_length(spec, weights), context.sequence_length)
    return EngineInfo(length, spec.slots, weights.fingerprint(engine), weights.sampling_defaults(), placement)
