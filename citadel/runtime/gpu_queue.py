"""What to do next with the box's memory: a pure decision over a picture of the registry, returned as effects.

One queue, first come, first served, orders all who want the GPU: loads of models and media jobs. The decision:
 1. A wanted model that is loaded and not draining is admitted: its calls go to its slots.
 2. While a load or an unload is under way, nothing else begins: memory can only be measured at rest.
 3. A dismissed model that is idle is unloaded.
 4. A media job that states its memory, fits beside what is there, and delays nobody before it, is granted.
 5. With nothing wanted, draining models take calls again, and idle ones past their time to live are unloaded.
 6. While a media job has the whole GPU, everybody waits for it.
 7. The first of the queue is served if it fits into what is free; a job that wants the whole GPU when nothing that
    uses the GPU is left.
 8. Else room is made: idle models go first, least recently used first, then busy ones, which are drained and never
    cut off. Nothing idle is unloaded before the busy ones have drained, so it can answer until then. A model that has
    been here for less than the minimum residency stays, until the first has waited for the maximum.
 9. A model for which all of that would not be enough is refused with both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from citadel.engine import Need


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load that somebody waits for since `since`. `need` is None while the weights are still looked at or fetched."""

    model: str
    need: Need | None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A media job that waits, or runs. `memory` in bytes of GPU memory; None wants the whole GPU."""

    lease: str
    memory: int | None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model. `expires_at` is when its idle time to live ends; times on the monotonic clock.

    `dismissed`: somebody asked for its unloading. `since`: when it was loaded.
    """

    model: str
    need: Need
    busy: bool
    draining: bool
    dismissed: bool
    pinned: bool
    since: float
    last_used: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class View:
    """`running` are the media jobs that were granted. `has_gpu`: without one, RAM is what everybody shares."""

    queue: Sequence[Wanted | Job]
    residents: Sequence[Resident]
    running: Sequence[Job]
    free: Need
    has_gpu: bool
    working: bool
    """A load or an unload is under way."""
    now: float
    min_residency_s: float = 0.0
    max_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Admit:
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    model: str


@dataclass(frozen=True, slots=True)
class Drain:
    model: str
    on: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """`needed` and `free` bytes of the memory named by `kind`, counting as free what eviction could give."""

    model: str
    kind: str
    needed: int
    free: int


@dataclass(frozen=True, slots=True)
class Grant:
    lease: str


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to do before `at` but what an event brings."""

    at: float


Effect = Admit | Load | Unload | Drain | Refuse | Grant | LookAgain


def decide(view: View) -> list[Effect]:
    here = {resident.model: resident for resident in view.residents}
    models = [wanted.model for wanted in view.queue if isinstance(wanted, Wanted)]
    usable = [model for model in models if model in here and not here[model].draining]
    effects: list[Effect] = [Admit(model) for model in usable]
    if view.working:
        return effects
    dismissed = next((resident for resident in view.residents if resident.dismissed and not resident.busy), None)
    if dismissed is not None:
        return [*effects, Unload(dismissed.model)]
    pending = [each for each in view.queue if isinstance(each, Job) or _may_load(each, here)]
    if (job := _fits_beside(pending, view)) is not None:
        return [*effects, Grant(job.lease)]
    if not pending:
        expired = [Unload(resident.model) for resident in view.residents if _expired(resident, view.now)]
        return [*effects, *_drains(set(), view.residents), *expired[:1]]
    if any(job.memory is None for job in view.running):
        return [*effects, *_drains(set(), view.residents)]
    head = pending[0]
    return effects + (_serve_job(head, view) if isinstance(head, Job) else _serve_model(head, view))


def _may_load(wanted: Wanted, here: dict[str, Resident]) -> bool:
    return wanted.need is not None and wanted.model not in here


def _serve_model(wanted: Wanted, view: View) -> list[Effect]:
    assert wanted.need is not None
    victims = _victims(wanted.need, view)
    if victims is None:
        return [_refusal(wanted.model, wanted.need, view)]
    return _after_making_room(Load(wanted.model), wanted.since, victims, view)


def _serve_job(job: Job, view: View) -> list[Effect]:
    if job.memory is None:
        if view.running:
            return _drains(set(), view.residents)
        victims: list[Resident] | None = _others(view)
    else:
        victims = _victims(_as_need(job.memory, view), view)
    # A job that states more than the device has gets what can be made free, and must see for itself.
    return _after_making_room(Grant(job.lease), job.since, _others(view) if victims is None else victims, view)


def _others(view: View) -> list[Resident]:
    """The models that a job which wants the whole GPU must wait out: all that use it, but for the pinned."""
    return [each for each in view.residents if not each.pinned and (each.need.gpu > 0 or not view.has_gpu)]


def _after_making_room(then: Effect, since: float, victims: list[Resident], view: View) -> list[Effect]:
    overdue = view.now - since >= view.max_wait_s
    stay_until = max((each.since + view.min_residency_s for each in victims), default=0.0)
    if stay_until > view.now and not overdue:
        return [*_drains(set(), view.residents), LookAgain(min(stay_until, since + view.max_wait_s))]
    busy = {victim.model for victim in victims if victim.busy}
    effects = _drains(busy, view.residents)
    if not victims:
        effects.append(then)
    elif not busy:
        effects.append(Unload(victims[0].model))
    return effects


def _fits_beside(pending: Sequence[Wanted | Job], view: View) -> Job | None:
    """The first job with stated memory that can run now, without taking what somebody before it could have."""
    if any(job.memory is None for job in view.running):
        return None
    for index, job in enumerate(pending):
        if isinstance(job, Job) and job.memory is not None:
            left = _less(_free(view), _as_need(job.memory, view))
            before = pending[:index]
            if left is not None and all(_not_delayed(each, left, view) for each in before):
                return job
    return None


def _not_delayed(first: Wanted | Job, left: Need, view: View) -> bool:
    if isinstance(first, Job):
        return first.memory is not None and _less(left, _as_need(first.memory, view)) is not None
    return first.need is None or _fits(first.need, left)


def _drains(busy: set[str], residents: Sequence[Resident]) -> list[Effect]:
    """What changes so that exactly those models drain, and the dismissed ones."""
    wanted = {resident.model: resident.model in busy or resident.dismissed for resident in residents}
    return [Drain(each.model, on=wanted[each.model]) for each in residents if each.draining != wanted[each.model]]


def _expired(resident: Resident, now: float) -> bool:
    return not resident.busy and resident.expires_at is not None and resident.expires_at <= now


def _as_need(memory: int, view: View) -> Need:
    return Need(gpu=memory) if view.has_gpu else Need(ram=memory)


def _free(view: View) -> Need:
    """What is free once the running media jobs have taken what they stated."""
    stated = sum(job.memory or 0 for job in view.running)
    left = _less(view.free, _as_need(stated, view))
    return left if left is not None else Need(ram=0 if not view.has_gpu else view.free.ram, gpu=0)


def _less(free: Need, need: Need) -> Need | None:
    return Need(free.ram - need.ram, free.gpu - need.gpu) if _fits(need, free) else None


def _fits(need: Need, free: Need) -> bool:
    return need.ram <= free.ram and need.gpu <= free.gpu


def _victims(need: Need, view: View) -> list[Resident] | None:
    """The models to unload so that `need` fits, in the order of going; None if that cannot be reached."""
    free, victims = _free(view), list[Resident]()
    if _fits(need, free):
        return victims
    for resident in sorted(view.residents, key=lambda r: (r.busy, r.last_used)):
        if resident.pinned:
            continue
        victims.append(resident)
        free = Need(free.ram + resident.need.ram, free.gpu + resident.need.gpu)
        if _fits(need, free):
            return victims
    return None


def _refusal(model: str, need: Need, view: View) -> Effect:
    given = [resident.need for resident in view.residents if not resident.pinned]
    free = _free(view)
    ram, gpu = free.ram + sum(each.ram for each in given), free.gpu + sum(each.gpu for each in given)
    if view.running:  # a media job is there now; what it leaves free when it goes may be enough
        return LookAgain(view.now + _LOOK_AGAIN_S)
    return Refuse(model, "GPU memory", need.gpu, gpu) if need.gpu > gpu else Refuse(model, "RAM", need.ram, ram)


_LOOK_AGAIN_S = 5.0
