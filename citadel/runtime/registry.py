"""The one owner of every model: its state, its engine, who waits for it and who runs on it.

Calls come in by `call()`, which gives a `Ticket`; the ticket is granted when its model is loaded and has slots free.
One worker looks at the whole picture whenever something changed, asks `gpu_queue.decide` what to do next, and does
it. Between reading and changing this state there is no await, so no lock is needed. Every cause (a call, an idle time
limit, a crash, shutdown) changes a model's phase here, through `_move`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from typing import Any

import structlog

from citadel.config import Config
from citadel.engine import Engine, Need
from citadel.errors import (
    CitadelError,
    DeviceOffline,
    EngineRestarted,
    GpuBusy,
    InsufficientMemory,
    LlmUnavailable,
    Queued,
)
from citadel.messages import Waiting
from citadel.metrics import Metrics
from citadel.runtime import gpu_queue, memory, picture, sources, waiting, watchdog
from citadel.runtime.closing import Closer
from citadel.runtime.entry import Entry, ModelStatus, Ticket, status_of
from citadel.runtime.installed import AdapterOf, Prepared
from citadel.runtime.leases import Lease, LeaseDesk, LeaseStatus
from citadel.runtime.preparations import Preparations
from citadel.runtime.slots import Slots
from citadel.runtime.states import Loaded, Phase, Starting, Stopped, Unavailable, Unloading, check_move

log = structlog.get_logger("citadel.registry")

STORM_S = 600
"""Failures of one model's engine within this time belong together."""
KEEP_PLACE_S = 30
"""A queued load answered with 503 keeps its place this much longer than the time after which to ask again."""

LOOK_AGAIN_S = 1.0
"""After a fault of the server or of the driver while the queue was looked at."""


class Registry:
    """`learned` are load times in seconds of earlier runs by model id; `on_loaded` is told each new one."""

    def __init__(
        self,
        config: Config,
        adapter_of: AdapterOf,
        *,
        learned: Mapping[str, float],
        on_loaded: Callable[[str, float], None],
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self._on_loaded = on_loaded
        self._models = {
            id_: Entry(id_, settings, learned.get(id_, settings.cold_start_s))
            for id_, settings in config.models.items()
        }
        self._queue: list[Entry | Lease] = []
        self._operations: set[asyncio.Task[None]] = set()
        """Loads and unloads under way."""
        self._wake = asyncio.Event()
        self.leases = LeaseDesk(self._queue, config.gpu.lease_expiry_s, self._wake.set)
        self._preparations = Preparations(adapter_of, self._wake.set)
        self._considering: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closer = Closer(self._wake.set)
        self._look_again_at: float | None = None
        self._looked_at = -math.inf
        self._closed = False

    # -- for the composition root

    async def start(self) -> None:
        """Begin to work: look for every model's weights, queue the models to preload."""
        for entry in self._models.values():
            if entry.settings.preload:
                entry.held_until = math.inf
                self._want(entry)
        self._tasks = [
            asyncio.create_task(self._work(), name="registry"),
            asyncio.create_task(self._look_for_weights(), name="look for weights"),
            asyncio.create_task(
                watchdog.watch(lambda: picture.watched(self._models.values()), self._failed, time.monotonic),
                name="watchdog",
            ),
        ]

    async def close(self) -> None:
        """Refuse what waits, stop what loads, close every engine."""
        self._closed = True
        loads = [task for task in self._operations if task.get_name().startswith("load ")]
        preparing = [entry.preparing for entry in self._models.values() if entry.preparing is not None]
        stopped: list[asyncio.Task[Any]] = [*self._tasks, *loads, *preparing]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, *self._operations, return_exceptions=True)
        for entry in self._models.values():
            self._fail(entry, entry.waiting, DeviceOffline())
            if isinstance(entry.phase, Loaded):
                self._fail(entry, entry.phase.slots.waiting, DeviceOffline())
                self._unload(entry)
        await asyncio.gather(*self._operations)

    @property
    def stuck(self) -> bool:
        """Whether an engine was given up that is still there: the process then cannot end by itself."""
        return bool(self._closer.booked)

    # -- for one call

    async def prepare(self, model: str) -> Prepared | None:
        """What is known without loading; None while the weights are still to be fetched. Raises LlmUnavailable."""
        entry = self._models[model]
        if entry.prepared is not None:
            return entry.prepared
        self._refuse_in_backoff(entry)
        try:
            return await asyncio.shield(self._preparation(entry, fetch=False))
        except sources.SourceMissing as missing:
            if missing.fetchable and self.config.server.auto_download:
                return None
            raise LlmUnavailable(model, str(missing)) from None

    @contextlib.asynccontextmanager
    async def call(self, model: str, member: str, n: int) -> AsyncGenerator[Ticket]:
        """A ticket for `n` slots of `model`; on leaving, whatever it holds or waits for is given back."""
        ticket = Ticket(model, member, n, asyncio.get_running_loop().create_future())
        entry = self._models[model]
        self._enter(entry, ticket)
        try:
            yield ticket
        finally:
            self._leave(entry, ticket)

    async def wait(self, ticket: Ticket, budget_s: float, every_s: float) -> AsyncGenerator[Waiting, None]:
        """Yield at once and every `every_s` what the ticket waits for, until it is granted.

        Raises what is known at once before yielding anything, and `ModelLoading` or `Queued` when the model is not
        there after `budget_s`; the wait for a slot has no budget.
        """
        loop, entry = asyncio.get_running_loop(), self._models[ticket.model]
        began = loop.time()
        if not ticket.granted.done():
            await asyncio.wait({ticket.granted, self.considered()}, return_when=asyncio.FIRST_COMPLETED)
        deadline = loop.time() + budget_s
        while not ticket.granted.done():
            remaining = deadline - loop.time()
            status = waiting.waits_for(ticket, entry, picture.line(self._queue, self.leases, len(self._operations)))
            if status.kind != "slot" and remaining <= 0:
                raise self._out_of_patience(entry)
            yield status
            pause = every_s if status.kind == "slot" else min(every_s, remaining)
            await asyncio.wait({ticket.granted}, timeout=pause)
        ticket.granted.result()
        self.metrics.waited(ticket.model, loop.time() - began)

    def listen(self, ticket: Ticket, unread_tokens: int) -> None:
        """The call now waits for the engine; `unread_tokens` of its prompt, until the first token came."""
        ticket.attention.since, ticket.attention.unread_tokens = time.monotonic(), unread_tokens

    def heard(self, ticket: Ticket) -> None:
        """The call got tokens, and waits for its reader now."""
        ticket.attention.since, ticket.attention.unread_tokens = None, 0
        if isinstance(phase := self._models[ticket.model].phase, Loaded):
            phase.last_token = time.monotonic()

    # -- for the owner

    def load(self, model: str) -> None:
        """Queue a load that is kept though nobody waits for it; without effect on a loaded model."""
        entry = self._models[model]
        self._refuse_in_backoff(entry)
        if not isinstance(entry.phase, Loaded):
            entry.held_until = math.inf
            self._want(entry)

    def unload(self, model: str) -> None:
        """Unload as soon as its calls have ended; calls that come meanwhile load it again. A queued load is dropped."""
        entry = self._models[model]
        entry.held_until = -math.inf
        if isinstance(entry.phase, Loaded):
            entry.dismissed = entry.phase.draining = True
        self._wake.set()

    def pin(self, model: str, *, pinned: bool) -> None:
        """A pinned model is not unloaded to make room. It holds until the server ends."""
        self._models[model].pinned = pinned
        self._wake.set()

    def reload(self, config: Config) -> dict[str, str]:
        """Take a new configuration without touching running calls; returns what takes effect later, by model id."""
        later: dict[str, str] = {}
        for id_, settings in config.models.items():
            entry = self._models.setdefault(id_, Entry(id_, settings, settings.cold_start_s))
            if settings.loads_differently(entry.settings):
                entry.stale = True
                later |= {id_: "with its next load"} if isinstance(entry.phase, (Loaded, Starting)) else {}
            entry.settings, entry.pinned = settings, settings.pin
            self._forget_stale(entry)
        for id_ in self._models.keys() - config.models.keys():
            self.unload(id_)
            later[id_] = "it is unloaded when its calls have ended"
        self.config = config
        self._wake.set()
        return later

    # -- for those who look

    def lease_status(self, id_: str) -> LeaseStatus:
        return self.leases.status(id_, len(self._operations) + len(self.leases.running))

    def line(self) -> list[picture.Place]:
        """Who has the GPU for a media job, then who waits for it, in order."""
        return picture.places(self._queue, self.leases.running)

    def status(self, model: str) -> ModelStatus:
        return status_of(self._models[model], time.monotonic())

    def check_integrity(self) -> None:
        """Raises AssertionError unless, with no call open, nothing is held, waited for, or under way."""
        under_way = [task.get_name() for task in self._operations]
        problems = picture.left_over(self._models.values(), self._queue, self.leases, under_way)
        assert not problems, "; ".join(problems)

    # -- tickets

    def _enter(self, entry: Entry, ticket: Ticket) -> None:
        if self._closed:
            raise DeviceOffline
        self._bury_if_dead(entry)
        self._refuse_in_backoff(entry)
        phase = entry.phase
        if isinstance(phase, Loaded) and not phase.draining and not entry.waiting:
            self._grant(phase, phase.slots.enter(ticket, ticket.member, ticket.n))
        else:
            entry.waiting[ticket] = None
            self._want(entry)

    def _leave(self, entry: Entry, ticket: Ticket) -> None:
        entry.waiting.pop(ticket, None)
        if not ticket.granted.done():
            ticket.granted.cancel()
        elif not ticket.granted.cancelled():
            ticket.granted.exception()  # marks it as seen: a caller that left early has not looked
        if isinstance(entry.phase, Loaded):
            self._grant(entry.phase, entry.phase.slots.leave(ticket))
            entry.phase.last_used = time.monotonic()
        self._bury_if_dead(entry)
        self._wake.set()

    def _grant(self, phase: Loaded, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.granted.done():
                ticket.granted.set_result(phase.engine)

    def _refuse_in_backoff(self, entry: Entry) -> None:
        if isinstance(entry.phase, Unavailable) and time.monotonic() < entry.phase.retry_at:
            raise LlmUnavailable(entry.id, entry.phase.reason)

    def _out_of_patience(self, entry: Entry) -> CitadelError:
        now = time.monotonic()
        error = waiting.out_of_patience(
            entry, self._models.values(), picture.line(self._queue, self.leases, len(self._operations)), now
        )
        if isinstance(error, Queued):
            keep = error.fields["retry_after_s"] + KEEP_PLACE_S
            entry.held_until = max(entry.held_until, now + keep)
        return error

    # -- the worker

    async def _work(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            self._wake.clear()
            askers, self._considering = self._considering, []
            try:
                await self._look()
            except Exception:  # without this worker nobody would ever be served again
                log.exception("the queue could not be looked at; it is tried again")
                self._look_again_at = time.monotonic() + LOOK_AGAIN_S
            for asker in askers:
                if not asker.done():
                    asker.set_result(None)

    async def _look(self) -> None:
        """Measure what is free, decide what to do about the whole picture, and begin it."""
        gpu, self._looked_at = self.config.gpu, time.monotonic()
        booked = [resident.need for resident in picture.residents(self._models.values())] + self._closer.booked
        working = bool(self._operations)  # what is measured then may be wrong by the time it has ended
        free = await asyncio.to_thread(memory.free, booked, gpu.ram_limit_gb, gpu.memory_limit_gb)
        self._prune_queue()
        working = working or bool(self._operations)
        view = picture.view(self._models.values(), self._queue, self.leases, free, self.config.gpu, working=working)
        self._look_again_at = None
        for effect in gpu_queue.decide(view):
            self._perform(effect)

    def _pause(self) -> float | None:
        """Seconds until something is due that no event announces; None if nothing is."""
        times = [self._look_again_at, self.leases.next_expiry()]
        residents, busy_after_s = picture.residents(self._models.values()), self.config.gpu.busy_after_s
        return waiting.pause(self._queue, residents, times, busy_after_s, self._looked_at)

    def considered(self) -> asyncio.Future[None]:
        """Done when the worker has looked at the picture as it is now."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._considering.append(done)
        self._wake.set()
        return done

    def _want(self, entry: Entry) -> None:
        if not isinstance(entry.phase, Starting) and entry not in self._queue:
            entry.asked_at = time.monotonic()
            self._queue.append(entry)
        self._wake.set()

    def _prune_queue(self) -> None:
        """A load not begun is dropped when its last caller hung up; one not looked at yet is looked at."""
        now = time.monotonic()
        self.leases.expire(now)
        self._queue[:] = [
            each for each in self._queue if isinstance(each, Lease) or each.waiting or each.held_until > now
        ]
        media = bool(self.leases.running)
        for each in list(self._queue):
            if isinstance(each, Lease):
                media = True
            elif media and each.waiting and now - each.asked_at >= self.config.gpu.busy_after_s:
                self._queue.remove(each)
                waited = round(now - each.asked_at)
                self._fail(each, each.waiting, GpuBusy(f"media jobs have held the queue for {waited} s"))
            elif each.prepared is None and each.preparing is None:
                self._preparation(each, fetch=True)

    def _perform(self, effect: gpu_queue.Effect) -> None:
        if isinstance(effect, gpu_queue.Grant):
            log.info("lease granted", lease=effect.lease)
            self.leases.grant(effect.lease)
            self._wake.set()
            return
        if isinstance(effect, gpu_queue.LookAgain):
            self._look_again_at = effect.at
            return
        entry = self._models[effect.model]
        match effect:
            case gpu_queue.Admit():
                self._admit(entry)
            case gpu_queue.Load():
                self._queue.remove(entry)
                self._move(entry, Starting(time.monotonic(), entry.expected_load_s))
                self._begin(self._load(entry), f"load {entry.id}")
            case gpu_queue.Unload():
                self._unload(entry)
            case gpu_queue.Drain(on=on):
                assert isinstance(entry.phase, Loaded)
                entry.phase.draining = on
                self._wake.set()
            case gpu_queue.Refuse(kind=kind, needed=needed, free=free):
                self._queue.remove(entry)
                error = InsufficientMemory(entry.id, kind, needed, free, detail=self._closer.detail)
                self._fail(entry, entry.waiting, error)
                self._wake.set()

    def _begin(self, operation: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(operation, name=name)
        self._operations.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._operations.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("operation failed", operation=task.get_name(), exc_info=error)

    def _admit(self, entry: Entry) -> None:
        """The model is there: its waiting calls go to its slots, in the order they came."""
        assert isinstance(entry.phase, Loaded)
        if entry in self._queue:
            self._queue.remove(entry)
        entry.held_until = -math.inf
        tickets, entry.waiting = list(entry.waiting), {}
        for ticket in tickets:
            self._grant(entry.phase, entry.phase.slots.enter(ticket, ticket.member, ticket.n))

    # -- what takes time

    async def _look_for_weights(self) -> None:
        for entry in self._models.values():
            missing = await self._preparations.missing(entry, self.config)
            if missing is not None and isinstance(entry.phase, Stopped):
                self._missing(entry, missing)

    def _preparation(self, entry: Entry, *, fetch: bool) -> asyncio.Task[Prepared]:
        """The one under way, or a new one. Its failure is taken note of once, however many wait for it."""
        if entry.preparing is None:
            task = self._preparations.of(entry, self.config, fetch=fetch)
            task.add_done_callback(lambda done: self._preparation_ended(entry, done, fetched=fetch))
        assert entry.preparing is not None
        return entry.preparing

    def _preparation_ended(self, entry: Entry, task: asyncio.Task[Prepared], *, fetched: bool) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, sources.SourceMissing) and not fetched:
            if not (error.fetchable and self.config.server.auto_download):
                self._missing(entry, str(error))
            return
        if entry in self._queue:
            self._queue.remove(entry)
        self._unavailable(entry, str(error.fields["reason"]) if isinstance(error, LlmUnavailable) else str(error))

    async def _load(self, entry: Entry) -> None:
        phase, prepared = entry.phase, entry.prepared
        assert isinstance(phase, Starting)
        assert prepared is not None

        def progress(fraction: float) -> None:
            phase.progress = fraction

        log.info("loading", model=entry.id, engine=entry.settings.engine)
        try:
            engine = await prepared.adapter.load(prepared.spec, progress)
        except asyncio.CancelledError:
            self._move(entry, Stopped())
            raise
        except LlmUnavailable as error:
            self._unavailable(entry, str(error.fields["reason"]))
        except Exception:
            log.exception("load failed", model=entry.id)
            self._unavailable(entry, "a fault of the server, see its log")
        else:
            self._loaded(entry, phase, engine)

    def _loaded(self, entry: Entry, phase: Starting, engine: Engine) -> None:
        now = time.monotonic()
        entry.info, entry.backoff_s, entry.expected_load_s = engine.info, 0.0, now - phase.since
        self._on_loaded(entry.id, entry.expected_load_s)
        self.metrics.loaded(entry.id, entry.expected_load_s)
        self._move(entry, Loaded(engine, Slots(engine.info.slots), since=now, last_used=now, last_token=now))
        self._admit(entry)

    def _unload(self, entry: Entry, failure: str | None = None) -> None:
        assert isinstance(entry.phase, Loaded)
        engine = entry.phase.engine
        self.metrics.unloading(entry.id, failed=failure is not None, dismissed=entry.dismissed)
        entry.dismissed = False
        self._move(entry, Unloading(engine))
        self._begin(self._close_engine(entry, engine, failure), f"unload {entry.id}")

    def _forget_stale(self, entry: Entry) -> None:
        """What was read of files that the configuration no longer names; a loaded model is still described by it."""
        if entry.stale and not isinstance(entry.phase, (Loaded, Starting, Unloading)):
            entry.stale, entry.prepared = False, None

    async def _close_engine(self, entry: Entry, engine: Engine, failure: str | None) -> None:
        need = entry.prepared.need if entry.prepared is not None else Need()
        try:
            await self._closer.close(entry.id, engine, need)
        finally:
            self._move(entry, Stopped())
            self.metrics.unloaded(entry.id)
            self._forget_stale(entry)
            if failure is not None and len(entry.deaths) > 1:
                self._storm(entry, failure)

    # -- engines that fail

    def _bury_if_dead(self, entry: Entry) -> None:
        if isinstance(entry.phase, Loaded) and (reason := entry.phase.engine.dead) is not None:
            self._failed(entry.id, reason)

    def _failed(self, model: str, reason: str) -> None:
        """Close a dead or stalled engine, which ends its calls, and load the model again; storms of it back off."""
        entry = self._models[model]
        if not isinstance(entry.phase, Loaded):
            return
        log.error("engine failed", model=model, reason=reason)
        now = time.monotonic()
        entry.deaths = [at for at in entry.deaths if at > now - STORM_S] + [now]
        self._fail(entry, entry.phase.slots.waiting, EngineRestarted(model, reason))
        for ticket in entry.phase.slots.running:
            ticket.failure = reason
        self._unload(entry, failure=reason)
        if len(entry.deaths) == 1:
            entry.held_until = math.inf
            self._want(entry)

    # -- the ways down

    def _missing(self, entry: Entry, reason: str) -> None:
        """No back-off: looking for files again costs next to nothing, and they may have come."""
        self._move(entry, Unavailable(reason, time.monotonic()))

    def _unavailable(self, entry: Entry, reason: str) -> None:
        self.metrics.load_failed(entry.id)
        first, longest = entry.settings.backoff_s
        entry.backoff_s = min(max(first, entry.backoff_s * 2), longest)
        entry.prepared = None  # the files may be other ones at the next try
        self._move(entry, Unavailable(reason, time.monotonic() + entry.backoff_s))
        self._fail(entry, entry.waiting, LlmUnavailable(entry.id, reason))

    def _storm(self, entry: Entry, reason: str) -> None:
        """It died again soon after it was restarted: the next try is a call's that comes after the back-off."""
        first, longest = entry.settings.backoff_s
        wait = min(first * 2 ** (len(entry.deaths) - 2), longest)
        self._move(entry, Unavailable(f"it failed {len(entry.deaths)} times lately: {reason}", time.monotonic() + wait))

    def _fail(self, entry: Entry, tickets: Iterable[Ticket], error: CitadelError) -> None:
        entry.held_until = -math.inf
        for ticket in list(tickets):
            entry.waiting.pop(ticket, None)
            if not ticket.granted.done():
                ticket.granted.set_exception(error)

    def _move(self, entry: Entry, phase: Phase) -> None:
        check_move(entry.phase, phase)
        log.info("model", model=entry.id, was=type(entry.phase).__name__, now=type(phase).__name__)
        entry.phase = phase
