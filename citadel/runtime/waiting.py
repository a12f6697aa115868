"""What a call waits for, and what it is told when its patience ends. Reads of the registry's data, nothing more."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from citadel.errors import CitadelError, ModelLoading, Queued
from citadel.messages import Waiting
from citadel.runtime.entry import Entry, Ticket, remaining_load_s
from citadel.runtime.gpu_queue import Resident
from citadel.runtime.leases import Lease
from citadel.runtime.states import Loaded, Starting, Unloading


@dataclass(frozen=True, slots=True)
class Line:
    """The queue and what goes before all of it: operations under way and media jobs that run."""

    queue: Sequence[Entry | Lease]
    operations: int
    running_jobs: int
    hold_s: float
    """How long a media job is expected to keep the GPU."""

    def ahead(self, entry: Entry) -> int:
        return (self.queue.index(entry) if entry in self.queue else 0) + self.operations + self.running_jobs

    def expected_s(self, entry: Entry) -> float:
        """Until the model should be loaded: its own load, and what goes first in the queue or holds the GPU."""
        before = self.queue[: self.queue.index(entry)] if entry in self.queue else ()
        first = sum(self.hold_s if isinstance(each, Lease) else each.expected_load_s for each in before)
        return first + self.running_jobs * self.hold_s + entry.expected_load_s


def waits_for(ticket: Ticket, entry: Entry, line: Line) -> Waiting:
    match entry.phase:
        case Loaded() if ticket not in entry.waiting:
            return Waiting("slot", entry.id)
        case Starting():
            return Waiting("loading", entry.id)
        case _:
            return Waiting("queued", entry.id, line.ahead(entry))


def out_of_patience(entry: Entry, models: Iterable[Entry], line: Line, now: float) -> CitadelError:
    """`ModelLoading` or `Queued`, with the time after which to ask again."""
    if isinstance(entry.phase, Starting):
        return ModelLoading(entry.id, remaining_load_s(entry.phase, now))
    under_way = sum(remaining_load_s(each.phase, now) for each in models if isinstance(each.phase, Starting))
    retry = max(1, math.ceil(line.expected_s(entry) + under_way))
    occupied = "a media job is running" if line.running_jobs else _occupied_by(models)
    return Queued(entry.id, line.ahead(entry), retry, f"waiting for the GPU: {occupied}")


def pause(
    queue: Sequence[Entry | Lease],
    residents: Sequence[Resident],
    times: Sequence[float | None],
    busy_after_s: float,
    looked_at: float,
) -> float | None:
    """Seconds until something of this is due: a place that ends, a wait that does, an idle model's time, or `times`.

    What was due when the queue was last looked at, and is still there, waits for an event and not for a time.
    """
    entries = [each for each in queue if isinstance(each, Entry)]
    due = [at for at in times if at is not None]
    due += [entry.held_until for entry in entries if not entry.waiting and entry.held_until < math.inf]
    due += [entry.asked_at + busy_after_s for entry in entries if entry.waiting]
    due += [each.expires_at for each in residents if each.expires_at is not None and not each.busy]
    to_come = [at for at in due if at > looked_at]
    return max(0.0, min(to_come) - time.monotonic()) if to_come else None


def _occupied_by(models: Iterable[Entry]) -> str:
    draining, used = list[str](), list[str]()
    for entry in models:
        match entry.phase:
            case Starting():
                return f"{entry.id} is loading"
            case Unloading():
                return f"{entry.id} is being unloaded"
            case Loaded(draining=True):
                draining.append(entry.id)
            case Loaded(slots=slots) if not slots.idle:
                used.append(entry.id)
            case _:
                continue
    if draining:
        return f"{', '.join(draining)} finishes its requests"
    return f"{', '.join(used)} is in use" if used else "the load has not begun"
