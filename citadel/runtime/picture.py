"""The registry's data as its readers need it: the queue's decision, the watchdog, and those who wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from citadel.config import Gpu
from citadel.engine import Need
from citadel.runtime import memory
from citadel.runtime.entry import Entry, resident_of, watched_of
from citadel.runtime.gpu_queue import Effect, Grant, Job, Load, Refuse, Resident, View, Wanted
from citadel.runtime.leases import Lease, LeaseDesk
from citadel.runtime.states import Loaded, Starting, Unloading
from citadel.runtime.waiting import Line
from citadel.runtime.watchdog import Watched


@dataclass(frozen=True, slots=True)
class Place:
    """One place in the GPU's queue. `name` is a model's id or a lease's; `asked_s` ago it came."""

    kind: Literal["model", "image", "music", "other"]
    name: str
    running: bool
    asked_s: float
    gpu_memory: int | None = None


def places(queue: Sequence[Entry | Lease], running: Sequence[Lease]) -> list[Place]:
    now, found = time.monotonic(), list[Place]()
    for each in (*running, *queue):
        if isinstance(each, Lease):
            granted = each.granted_at is not None
            found.append(Place(each.kind, each.id, granted, now - each.asked_at, each.memory))
        else:
            found.append(Place("model", each.id, running=False, asked_s=now - each.asked_at))
    return found


def residents(models: Iterable[Entry]) -> list[Resident]:
    return [resident for entry in models if (resident := resident_of(entry)) is not None]


def watched(models: Iterable[Entry]) -> list[Watched]:
    return [each for entry in models if (each := watched_of(entry)) is not None]


def line(queue: Sequence[Entry | Lease], leases: LeaseDesk, operations: int) -> Line:
    return Line(queue, operations, len(leases.running), leases.holds.mean_s)


def view(
    models: Iterable[Entry],
    queue: Sequence[Entry | Lease],
    leases: LeaseDesk,
    free: Need,
    settings: Gpu,
    *,
    stuck: Sequence[Need],
    working: bool,
) -> View:
    return View(
        queue=[_wanted(each) for each in queue],
        residents=residents(models),
        running=[lease.job for lease in leases.running],
        free=free,
        has_gpu=memory.has_gpu(),
        working=working,
        now=time.monotonic(),
        min_residency_s=settings.min_residency_s,
        max_wait_s=settings.max_wait_s,
        stuck=stuck,
    )


def asked_by(effect: Effect, queue: Sequence[Entry | Lease]) -> str | None:
    """The id of the request that an effect is for: of who is loaded or granted, else of who is made room for."""
    match effect:
        case Load() | Refuse():
            name = effect.model
        case Grant():
            name = effect.lease
        case _:
            name = next((each.id for each in queue), "")
    return next((each.asked_by for each in queue if each.id == name), None)


def left_over(
    models: Iterable[Entry], queue: Sequence[Entry | Lease], leases: LeaseDesk, operations: Sequence[str]
) -> list[str]:
    """What should not be there when no call is open."""
    found = [f"queued: {each.id}" for each in queue]
    found += [f"a media job holds the GPU: {lease.id}" for lease in leases.running]
    found += [f"under way: {name}" for name in operations]
    for entry in models:
        if entry.waiting:
            found.append(f"{entry.id}: calls wait")
        if isinstance(entry.phase, (Starting, Unloading)):
            found.append(f"{entry.id}: {entry.phase}")
        if isinstance(entry.phase, Loaded) and not entry.phase.slots.idle:
            found.append(f"{entry.id}: slots are held")
    return found


def _wanted(each: Entry | Lease) -> Wanted | Job:
    if isinstance(each, Lease):
        return each.job
    if each.prepared is None:
        return Wanted(each.id, None, each.asked_at)
    return Wanted(each.id, each.prepared.need, each.asked_at, each.prepared.swap_key)
