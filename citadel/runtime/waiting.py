"""What a call waits for, and what it is told when its patience ends. Reads of the registry's data, nothing more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from citadel.errors import CitadelError, ModelLoading, Queued
from citadel.messages import Waiting
from citadel.runtime.entry import Entry, Ticket, remaining_load_s
from citadel.runtime.states import Loaded, Starting, Unloading


def waits_for(ticket: Ticket, entry: Entry, queue: Sequence[Entry], operations: int) -> Waiting:
    match entry.phase:
        case Loaded() if ticket not in entry.waiting:
            return Waiting("slot", entry.id)
        case Starting():
            return Waiting("loading", entry.id)
        case _:
            return Waiting("queued", entry.id, _ahead(entry, queue, operations))


def out_of_patience(
    entry: Entry, models: Iterable[Entry], queue: Sequence[Entry], operations: int, now: float
) -> CitadelError:
    """`ModelLoading` or `Queued`, with the time after which to ask again."""
    if isinstance(entry.phase, Starting):
        return ModelLoading(entry.id, remaining_load_s(entry.phase, now))
    before = queue[: queue.index(entry)] if entry in queue else []
    retry = max(1, math.ceil(sum(each.expected_load_s for each in [*before, entry])))
    return Queued(entry.id, _ahead(entry, queue, operations), retry, f"waiting for the GPU: {_occupied_by(models)}")


def _ahead(entry: Entry, queue: Sequence[Entry], operations: int) -> int:
    """How many go first: earlier loads of the queue, and what is under way."""
    return (queue.index(entry) if entry in queue else 0) + operations


def _occupied_by(models: Iterable[Entry]) -> str:
    draining: list[str] = []
    for entry in models:
        match entry.phase:
            case Starting():
                return f"{entry.id} is loading"
            case Unloading():
                return f"{entry.id} is being unloaded"
            case Loaded(draining=True):
                draining.append(entry.id)
            case _:
                continue
    return f"{', '.join(draining)} finishes its requests" if draining else "the load has not begun"
