"""What the registry keeps of each model and of each call, and how that looks to others. Data, and reads of it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

from citadel.config import Model
from citadel.engine import Engine, EngineInfo, Placement
from citadel.runtime.gpu_queue import Resident
from citadel.runtime.installed import Prepared
from citadel.runtime.states import PUBLIC, Loaded, Phase, Starting, State, Stopped, Unavailable
from citadel.runtime.watchdog import Attention, Watched


@dataclass(eq=False, slots=True)
class Ticket:
    """One call's claim on a model: first for a load where it needs one, then for `n` slots.

    `failure`: why its engine was taken away; the engine itself only knows that it was closed.
    """

    model: str
    member: str
    n: int
    granted: asyncio.Future[Engine]
    attention: Attention = field(default_factory=Attention)
    failure: str | None = None

    @property
    def engine(self) -> Engine:
        """The engine to run on; only once granted."""
        return self.granted.result()


@dataclass(eq=False, slots=True)
class Entry:
    """One configured model.

    `waiting` calls are not in the slots yet, in the order they came. The model stands in the queue since `asked_at`, by
    the request `asked_by`, and is kept there until `held_until` though nobody waits (both times monotonic). `backoff_s`
    is how long the last failed start closed the door; `deaths` are those of its engines lately. `info` is of the last
    load. `dismissed`: to be unloaded as soon as it is idle. `stale`: `prepared` is of settings that have changed.
    `planned_again`: since it was last refused or loaded.
    `expected_swap_s` is how long it took to take over another's engine the last time.
    """

    id: str
    settings: Model
    expected_load_s: float
    expected_swap_s: float | None = None
    phase: Phase = field(default_factory=Stopped)
    prepared: Prepared | None = None
    preparing: asyncio.Task[Prepared] | None = None
    waiting: dict[Ticket, None] = field(default_factory=dict[Ticket, None])
    asked_at: float = 0.0
    asked_by: str | None = None
    held_until: float = -math.inf
    backoff_s: float = 0.0
    deaths: list[float] = field(default_factory=list[float])
    dismissed: bool = False
    stale: bool = False
    planned_again: bool = False
    pinned: bool = field(init=False)
    info: EngineInfo | None = None

    def __post_init__(self) -> None:
        self.pinned = self.settings.pin


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as its readers see it. `progress` and `remaining_s` while it starts, `reason` while unavailable.

    `running` and `waiting` count calls. `placement` is of a loaded model whose engine places its weights.
    """

    state: State
    context_length: int | None
    cold_start_s: int
    progress: float | None = None
    remaining_s: float | None = None
    reason: str | None = None
    running: int = 0
    waiting: int = 0
    pinned: bool = False
    draining: bool = False
    slots: int = 1
    placement: Placement | None = None


def status_of(entry: Entry, now: float) -> ModelStatus:
    phase = entry.phase
    status = ModelStatus(
        state=PUBLIC[type(phase)],
        context_length=entry.info.context_length if entry.info else entry.settings.context_length,
        cold_start_s=max(1, math.ceil(entry.expected_load_s)),
        waiting=len(entry.waiting),
        pinned=entry.pinned,
        slots=entry.settings.effective_slots,
    )
    match phase:
        case Starting():
            return replace(status, progress=phase.progress, remaining_s=remaining_load_s(phase, now))
        case Loaded():
            waiting = status.waiting + len(phase.slots.waiting)
            return replace(
                status,
                running=len(phase.slots.running),
                waiting=waiting,
                draining=phase.draining,
                slots=phase.slots.capacity,
                placement=phase.engine.info.placement,
            )
        case Unavailable():
            return replace(status, reason=phase.reason)
        case _:
            return status


def remaining_load_s(phase: Starting, now: float) -> int:
    """Whole seconds, at least 1: a load that takes longer than expected is always about to end."""
    return max(1, math.ceil(phase.expected_s - (now - phase.since)))


def resident_of(entry: Entry) -> Resident | None:
    """The model as the queue's decision sees it; None while it is not loaded."""
    phase, ttl = entry.phase, entry.settings.ttl_s
    if not isinstance(phase, Loaded) or entry.prepared is None:
        return None
    return Resident(
        model=entry.id,
        need=entry.prepared.need,
        busy=not phase.slots.idle,
        draining=phase.draining,
        dismissed=entry.dismissed,
        pinned=entry.pinned,
        since=phase.since,
        last_used=phase.last_used,
        expires_at=None if ttl is None or entry.pinned else phase.last_used + ttl,
        swap_key=entry.prepared.swap_key,
    )


def watched_of(entry: Entry) -> Watched | None:
    """The model as the watchdog sees it; None while it is not loaded."""
    phase = entry.phase
    if not isinstance(phase, Loaded):
        return None
    calls = tuple(ticket.attention for ticket in phase.slots.running)
    return Watched(entry.id, entry.settings.stall_s, phase.last_token, calls, phase.engine.dead)
