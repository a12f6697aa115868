"""What becomes of a model: it is loaded, swapped, unloaded, fails, is not there. The registry's hands, and only mover.

What takes time runs as an operation, a task in `operations`. Every cause (a call, an idle time limit, a crash,
shutdown) changes a model's phase here, through `_move`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from citadel.engine import Engine, Need, SwapEngine
from citadel.errors import DeviceOffline, EngineRestarted, LlmUnavailable
from citadel.metrics import Metrics
from citadel.runtime.claims import Claims
from citadel.runtime.closing import Closer
from citadel.runtime.entry import Entry
from citadel.runtime.slots import Slots
from citadel.runtime.states import Loaded, Phase, Starting, Stopped, Unavailable, Unloading, check_move

log = structlog.get_logger("citadel.registry")

STORM_S = 600
"""Failures of one model's engine within this time belong together."""


class Lifecycle:
    """`on_loaded` is told how many seconds each load took; `changed` is called when an operation has ended."""

    def __init__(
        self,
        claims: Claims,
        metrics: Metrics,
        on_loaded: Callable[[str, float], None],
        changed: Callable[[], None],
    ) -> None:
        self.operations: set[asyncio.Task[None]] = set()
        """Loads and unloads under way."""
        self.closer = Closer(changed)
        self._claims = claims
        self._metrics = metrics
        self._on_loaded = on_loaded
        self._changed = changed

    def load(self, entry: Entry) -> None:
        self._claims.drop(entry)
        self._move(entry, Starting(time.monotonic(), entry.expected_load_s))
        self._begin(self._load(entry), f"load {entry.id}")

    def swap(self, entry: Entry, old: Entry) -> None:
        """Load a model into the engine of another, which is stopped from now on."""
        engine = self._taken_down(old, failed=False)
        assert isinstance(engine, SwapEngine)
        self._claims.drop(entry)
        self._move(entry, Starting(time.monotonic(), entry.expected_swap_s or entry.expected_load_s))
        self._begin(self._swap(entry, old, engine), f"load {entry.id}")

    def unload(self, entry: Entry, failure: str | None = None) -> None:
        self._begin_closing(entry, self._taken_down(entry, failed=failure is not None), failure)

    def _taken_down(self, entry: Entry, *, failed: bool) -> Engine:
        """A loaded model's engine, which takes no calls from now on."""
        assert isinstance(entry.phase, Loaded)
        engine = entry.phase.engine
        self._metrics.unloading(entry.id, failed=failed, dismissed=entry.dismissed)
        entry.dismissed = False
        self._move(entry, Unloading(engine))
        return engine

    def offline(self, entry: Entry) -> None:
        """Refuse what waits for the model, and close its engine. To be called when no operation is under way."""
        self._claims.fail(entry, entry.waiting, DeviceOffline())
        if isinstance(entry.phase, Loaded):
            self._claims.fail(entry, entry.phase.slots.waiting, DeviceOffline())
            self.unload(entry)
        elif isinstance(entry.phase, Unloading):  # a swap of its engine was cancelled
            self._begin_closing(entry, entry.phase.engine, None)

    def loads(self) -> list[asyncio.Task[None]]:
        return [task for task in self.operations if task.get_name().startswith("load ")]

    def forget_stale(self, entry: Entry) -> None:
        """What was read of files that the configuration no longer names, or planned for the memory of then; a loaded
        model is still described by it."""
        fitted = entry.prepared is not None and entry.prepared.need.fitted
        if (entry.stale or fitted) and not isinstance(entry.phase, (Loaded, Starting, Unloading)):
            entry.stale, entry.prepared = False, None

    # -- operations

    def _begin(self, operation: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(operation, name=name)
        self.operations.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.operations.discard(task)
        self._changed()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("operation failed", operation=task.get_name(), exc_info=error)

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
            self.unavailable(entry, str(error.fields["reason"]))
        except Exception:
            log.exception("load failed", model=entry.id)
            self.unavailable(entry, "a fault of the server, see its log")
        else:
            entry.expected_load_s = time.monotonic() - phase.since
            self._on_loaded(entry.id, entry.expected_load_s)
            self._metrics.loaded(entry.id, entry.expected_load_s)
            self._loaded(entry, engine)

    async def _swap(self, entry: Entry, old: Entry, engine: SwapEngine) -> None:
        """A swap that fails leaves an engine that nobody may use: it is closed, and the model loaded afresh."""
        phase = entry.phase
        assert isinstance(phase, Starting)
        try:
            swapped = await self._swapped(entry, old, engine)
            if swapped is None:  # the closing is an operation of its own, since nothing cancels those that unload
                await asyncio.shield(self._begin_closing(old, engine, None))
        except asyncio.CancelledError:
            self._move(entry, Stopped())
            raise
        if swapped is None:
            phase.since, phase.expected_s = time.monotonic(), entry.expected_load_s
            await self._load(entry)
            return
        entry.expected_swap_s = time.monotonic() - phase.since
        self._metrics.swapped(entry.id, entry.expected_swap_s)
        self._stopped(old)
        self._loaded(entry, swapped)

    async def _swapped(self, entry: Entry, old: Entry, engine: SwapEngine) -> Engine | None:
        assert entry.prepared is not None
        log.info("swapping in place", model=entry.id, old=old.id)
        try:
            return await engine.swap_to(entry.prepared.spec)
        except LlmUnavailable as error:
            log.warning("not swapped in place but loaded", model=entry.id, old=old.id, reason=error.fields["reason"])
        except Exception:
            log.exception("swap failed", model=entry.id, old=old.id)
        return None

    def _loaded(self, entry: Entry, engine: Engine) -> None:
        now = time.monotonic()
        entry.info, entry.backoff_s = engine.info, 0.0
        self._move(entry, Loaded(engine, Slots(engine.info.slots), since=now, last_used=now, last_token=now))
        self._claims.admit(entry)

    def _begin_closing(self, entry: Entry, engine: Engine, failure: str | None) -> asyncio.Task[None]:
        return self._begin(self._close_engine(entry, engine, failure), f"unload {entry.id}")

    async def _close_engine(self, entry: Entry, engine: Engine, failure: str | None) -> None:
        need = entry.prepared.need if entry.prepared is not None else Need()
        try:
            await self.closer.close(entry.id, engine, need)
        finally:
            self._stopped(entry)
            if failure is not None and len(entry.deaths) > 1:
                self._storm(entry, failure)

    def _stopped(self, entry: Entry) -> None:
        self._move(entry, Stopped())
        self._metrics.unloaded(entry.id)
        self.forget_stale(entry)

    # -- the ways down

    def bury_if_dead(self, entry: Entry) -> None:
        if isinstance(entry.phase, Loaded) and (reason := entry.phase.engine.dead) is not None:
            self.failed(entry, reason)

    def failed(self, entry: Entry, reason: str) -> None:
        """Close a dead or stalled engine, which ends its calls, and load the model again; storms of it back off.

        This is the one operation that may begin while another is under way: a dead engine must not keep its memory. It
        can only give some back, so what was decided for the other stays right, and nothing new begins before both end.
        """
        if not isinstance(entry.phase, Loaded):
            return
        log.error("engine failed", model=entry.id, reason=reason)
        now = time.monotonic()
        entry.deaths = [at for at in entry.deaths if at > now - STORM_S] + [now]
        self._claims.fail(entry, entry.phase.slots.waiting, EngineRestarted(entry.id, reason))
        for ticket in entry.phase.slots.running:
            ticket.failure = reason
        self.unload(entry, failure=reason)
        if len(entry.deaths) == 1:
            entry.held_until = math.inf
            self._claims.want(entry)

    def missing(self, entry: Entry, reason: str) -> None:
        """No back-off: looking for files again costs next to nothing, and they may have come."""
        self._move(entry, Unavailable(reason, time.monotonic()))

    def unavailable(self, entry: Entry, reason: str) -> None:
        self._metrics.load_failed(entry.id)
        first, longest = entry.settings.backoff_s
        entry.backoff_s = min(max(first, entry.backoff_s * 2), longest)
        entry.prepared = None  # the files may be other ones at the next try
        self._move(entry, Unavailable(reason, time.monotonic() + entry.backoff_s))
        self._claims.fail(entry, entry.waiting, LlmUnavailable(entry.id, reason))

    def _storm(self, entry: Entry, reason: str) -> None:
        """It died again soon after it was restarted: the next try is a call's that comes after the back-off. Those that
        came while it was closed are told so, or they would load it at once."""
        first, longest = entry.settings.backoff_s
        wait = min(first * 2 ** (len(entry.deaths) - 2), longest)
        why = f"it failed {len(entry.deaths)} times lately: {reason}"
        self._move(entry, Unavailable(why, time.monotonic() + wait))
        self._claims.drop(entry)
        self._claims.fail(entry, entry.waiting, LlmUnavailable(entry.id, why))

    def _move(self, entry: Entry, phase: Phase) -> None:
        check_move(entry.phase, phase)
        log.info("model", model=entry.id, was=type(entry.phase).__name__, now=type(phase).__name__)
        entry.phase = phase
