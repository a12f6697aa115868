"""The states of a model, and the only moves between them.

A phase carries exactly the data that exists in it: there is no engine without `Loaded`, no reason without
`Unavailable`. `LEGAL` is checked at every move, by the registry, which is the only mover.

    Stopped -> Starting -> Loaded -> Unloading -> Stopped
                  |                                  ^
                  +-> Unavailable -> Starting        |   (a cancelled load goes back to Stopped)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from citadel.engine import Engine
    from citadel.runtime.entry import Ticket
    from citadel.runtime.slots import Slots


class State(StrEnum):
    """What callers are told."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADED = "loaded"
    UNAVAILABLE = "unavailable"


MEANINGS: Final[dict[State, str]] = {
    State.STOPPED: "not in memory, or on its way out; a request for it loads it, or queues its load",
    State.STARTING: "being loaded",
    State.LOADED: "ready",
    State.UNAVAILABLE: "its weights are missing or its last start failed, and `reason` says why; a request for it "
    "tries again, after a wait that grows",
}
"""For the page of the documentation."""


@dataclass(slots=True)
class Stopped:
    pass


@dataclass(slots=True)
class Starting:
    """`since` on the monotonic clock; `progress` from 0.0 to 1.0; `expected_s` is what the whole load should take."""

    since: float
    expected_s: float
    progress: float = 0.0


@dataclass(slots=True)
class Loaded:
    """`draining`: it is to make room, so later calls wait for its next load. `last_token`: when any call got one."""

    engine: Engine
    slots: Slots[Ticket]
    since: float
    last_used: float
    last_token: float
    draining: bool = False


@dataclass(slots=True)
class Unloading:
    engine: Engine


@dataclass(slots=True)
class Unavailable:
    """The last start failed, or the weights are missing. `retry_at` on the monotonic clock."""

    reason: str
    retry_at: float


Phase = Stopped | Starting | Loaded | Unloading | Unavailable

PUBLIC: Final[dict[type[Phase], State]] = {
    Stopped: State.STOPPED,
    Starting: State.STARTING,
    Loaded: State.LOADED,
    Unloading: State.STOPPED,
    Unavailable: State.UNAVAILABLE,
}

LEGAL: Final[dict[type[Phase], frozenset[type[Phase]]]] = {
    Stopped: frozenset({Starting, Unavailable}),
    Starting: frozenset({Loaded, Unavailable, Stopped}),
    Loaded: frozenset({Unloading}),
    Unloading: frozenset({Stopped}),
    Unavailable: frozenset({Starting, Unavailable, Stopped}),
}


def check_move(old: Phase, new: Phase) -> None:
    if type(new) not in LEGAL[type(old)]:
        raise AssertionError(f"a model cannot go from {type(old).__name__} to {type(new).__name__}")
