"""The one owner of every model: its state, its engine, who waits for it and who runs on it.

Calls come in by `call()`, which gives a `Ticket`; the ticket is granted when its model is loaded and has slots free.
One worker looks at the whole picture whenever something changed, asks `gpu_queue.decide` what to do next, and does
it. Between reading and changing this state there is no await, so no lock is needed. Its parts are `Claims`, who wants
a model and who has it, and `Lifecycle`, which loads and unloads and is the only one to change a model's phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import structlog

from citadel import logs
from citadel.config import Config
from citadel.errors import (
    CitadelError,
    DeviceOffline,
    GpuBusy,
    InsufficientMemory,
    LlmUnavailable,
    Queued,
)
from citadel.messages import Waiting
from citadel.metrics import Metrics
from citadel.runtime import gpu_queue, memory, picture, sources, waiting, watchdog
from citadel.runtime.claims import Claims
from citadel.runtime.entry import Entry, ModelStatus, Ticket, status_of
from citadel.runtime.installed import AdapterOf, Prepared
from citadel.runtime.leases import Lease, LeaseDesk, LeaseStatus
from citadel.runtime.lifecycle import Lifecycle
from citadel.runtime.preparations import Preparations
from citadel.runtime.states import Loaded, Starting, Stopped, Unavailable

log = structlog.get_logger("citadel.registry")

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
        metrics: Metrics,
        *,
        learned: Mapping[str, float],
        on_loaded: Callable[[str, float], None],
    ) -> None:
        self.config = config
        self._metrics = metrics
        self._models = {
            id_: Entry(id_, settings, learned.get(id_, settings.cold_start_s))
            for id_, settings in config.models.items()
        }
        self._wake = asyncio.Event()
        self._claims = Claims(self._wake.set)
        self._queue = self._claims.queue
        self._lifecycle = Lifecycle(self._claims, metrics, on_loaded, self._wake.set)
        self.leases = LeaseDesk(self._queue, config.gpu.lease_expiry_s, self._wake.set)
        self._preparations = Preparations(adapter_of, self._wake.set, lambda: picture.residents(self._models.values()))
        self._considering: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._look_again_at: float | None = None
        self._looked_at = -math.inf
        self._closed = False

    # -- for the composition root

    async def start(self) -> None:
        """Begin to work: look for every model's weights, queue the models to preload."""
        for entry in self._models.values():
            if entry.settings.preload:
                entry.held_until = math.inf
                self._claims.want(entry)
        self._tasks = [
            asyncio.create_task(self._work(), name="registry"),
            asyncio.create_task(self._look_for_weights(), name="look for weights"),
            asyncio.create_task(
                watchdog.watch(
                    lambda: picture.watched(self._models.values()),
                    lambda model, reason: self._lifecycle.failed(self._models[model], reason),
                    time.monotonic,
                ),
                name="watchdog",
            ),
        ]

    async def close(self) -> None:
        """Refuse what waits, stop what loads, close every engine."""
        self._closed = True
        preparing = [entry.preparing for entry in self._models.values() if entry.preparing is not None]
        stopped: list[asyncio.Task[Any]] = [*self._tasks, *self._lifecycle.loads(), *preparing]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, *self._lifecycle.operations, return_exceptions=True)
        for entry in self._models.values():
            self._lifecycle.offline(entry)
        await asyncio.gather(*self._lifecycle.operations)

    @property
    def stuck(self) -> bool:
        """Whether an engine was given up that is still there: the process then cannot end by itself."""
        return bool(self._lifecycle.closer.booked)

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
            status = waiting.waits_for(
                ticket, entry, picture.line(self._queue, self.leases, len(self._lifecycle.operations))
            )
            if status.kind != "slot" and remaining <= 0:
                raise self._out_of_patience(entry)
            yield status
            pause = every_s if status.kind == "slot" else min(every_s, remaining)
            await asyncio.wait({ticket.granted}, timeout=pause)
        ticket.granted.result()
        self._metrics.waited(ticket.model, loop.time() - began)

    def listen(self, ticket: Ticket, unread_tokens: int) -> None:
        """The call now waits for the engine; `unread_tokens` of its prompt, until the first token came."""
        ticket.attention.since, ticket.attention.unread_tokens = time.monotonic(), unread_tokens

    def heard(self, ticket: Ticket) -> None:
        """The call got tokens, and waits for more."""
        attention, now = ticket.attention, time.monotonic()
        attention.since, attention.unread_tokens = now, 0
        if isinstance(phase := self._models[ticket.model].phase, Loaded):
            phase.last_token = now

    # -- for the owner

    def load(self, model: str) -> None:
        """Queue a load that is kept though nobody waits for it; without effect on a loaded model."""
        entry = self._models[model]
        self._refuse_in_backoff(entry)
        if not isinstance(entry.phase, Loaded):
            entry.held_until = math.inf
            self._claims.want(entry)

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
            self._lifecycle.forget_stale(entry)
        for id_ in self._models.keys() - config.models.keys():
            self.unload(id_)
            later[id_] = "it is unloaded when its calls have ended"
        self.config = config
        self._wake.set()
        return later

    # -- for those who look

    def lease_status(self, id_: str) -> LeaseStatus:
        return self.leases.status(id_, len(self._lifecycle.operations) + len(self.leases.running))

    def line(self) -> list[picture.Place]:
        """Who has the GPU for a media job, then who waits for it, in order."""
        return picture.places(self._queue, self.leases.running)

    def status(self, model: str) -> ModelStatus:
        return status_of(self._models[model], time.monotonic())

    def check_integrity(self) -> None:
        """Raises AssertionError unless, with no call open, nothing is held, waited for, or under way."""
        under_way = [task.get_name() for task in self._lifecycle.operations]
        problems = picture.left_over(self._models.values(), self._queue, self.leases, under_way)
        assert not problems, "; ".join(problems)

    # -- tickets

    def _enter(self, entry: Entry, ticket: Ticket) -> None:
        if self._closed:
            raise DeviceOffline
        self._lifecycle.bury_if_dead(entry)
        self._refuse_in_backoff(entry)
        self._claims.enter(entry, ticket)

    def _leave(self, entry: Entry, ticket: Ticket) -> None:
        self._claims.leave(entry, ticket)
        self._lifecycle.bury_if_dead(entry)
        self._wake.set()

    def _refuse_in_backoff(self, entry: Entry) -> None:
        if isinstance(entry.phase, Unavailable) and time.monotonic() < entry.phase.retry_at:
            raise LlmUnavailable(entry.id, entry.phase.reason)

    def _out_of_patience(self, entry: Entry) -> CitadelError:
        now = time.monotonic()
        error = waiting.out_of_patience(
            entry, self._models.values(), picture.line(self._queue, self.leases, len(self._lifecycle.operations)), now
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
        stuck = self._lifecycle.closer.booked
        booked = [resident.need for resident in picture.residents(self._models.values())] + stuck
        working = bool(self._lifecycle.operations)  # what is measured then may be wrong by the time it has ended
        free = await asyncio.to_thread(memory.free, booked, gpu.ram_limit_gb, gpu.memory_limit_gb)
        self._prune_queue()
        working = working or bool(self._lifecycle.operations)
        seen = self._models.values(), self._queue, self.leases, free, gpu
        view = picture.view(*seen, stuck=stuck, working=working)
        self._look_again_at = None
        for effect in gpu_queue.decide(view):
            with logs.on_behalf_of(picture.asked_by(effect, self._queue)):
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
                self._claims.fail(each, each.waiting, GpuBusy(f"media jobs have held the queue for {waited} s"))
            elif each.prepared is None and each.preparing is None:
                self._preparation(each, fetch=True)

    def _perform(self, effect: gpu_queue.Effect) -> None:
        if isinstance(effect, gpu_queue.Grant):
            log.info("lease granted", lease=effect.lease)
            self.leases.grant(effect.lease, effect.spare)
            self._wake.set()
            return
        if isinstance(effect, gpu_queue.LookAgain):
            self._look_again_at = effect.at
            return
        entry = self._models[effect.model]
        match effect:
            case gpu_queue.Admit():
                self._claims.admit(entry)
            case gpu_queue.Load():
                entry.planned_again = False
                self._lifecycle.load(entry)
            case gpu_queue.Swap(old=old):
                self._lifecycle.swap(entry, self._models[old])
            case gpu_queue.Unload():
                self._lifecycle.unload(entry)
            case gpu_queue.Drain(on=on):
                assert isinstance(entry.phase, Loaded)
                entry.phase.draining = on
                self._wake.set()
            case gpu_queue.Refuse() if self._plan_again(entry):
                self._wake.set()
            case gpu_queue.Refuse(kind=kind, needed=needed, free=free):
                self._queue.remove(entry)
                error = InsufficientMemory(entry.id, kind, needed, free, detail=self._lifecycle.closer.detail)
                self._claims.fail(entry, entry.waiting, error)
                self._lifecycle.forget_stale(entry)
                self._wake.set()

    def _plan_again(self, entry: Entry) -> bool:
        """A plan was made for the memory of its time: before its model is refused it is made again, once."""
        fitted = entry.prepared is not None and entry.prepared.need.fitted
        entry.planned_again = fitted and not entry.planned_again
        if entry.planned_again:
            entry.prepared = None
        return entry.planned_again

    # -- looking at files

    async def _look_for_weights(self) -> None:
        for entry in self._models.values():
            missing = await self._preparations.missing(entry, self.config)
            if missing is not None and isinstance(entry.phase, Stopped):
                self._lifecycle.missing(entry, missing)

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
                self._lifecycle.missing(entry, str(error))
            return
        self._claims.drop(entry)
        self._lifecycle.unavailable(
            entry, str(error.fields["reason"]) if isinstance(error, LlmUnavailable) else str(error)
        )
