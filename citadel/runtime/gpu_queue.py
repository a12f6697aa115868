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
    cut off. Nothing idle is unloaded before the busy ones have drained, so it can answer until then; but one that has
    drained stays so, or two models could take turns in being busy for ever. A busy model that has been here for less
    than the minimum residency goes on taking calls, until the first has waited for the maximum. A draining model
    whose calls come to be the first of the queue takes them.
    Of the idle ones, one whose engine the first can take over goes before the others, and is swapped for it in place
    of being unloaded. What fits beside all that is there never waits for any of this: it is loaded while they answer,
    those that drain included.
 9. A model for which all of that would not be enough is refused with both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from citadel.engine import Need


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load that somebody waits for since `since`. `need` is None while the weights are still looked at or fetched.

    Models with the same `swap_key` can take over each other's engine.
    """

    model: str
    need: Need | None
    since: float = 0.0
    swap_key: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A media job that waits, or runs. `memory` in bytes of GPU memory; None wants the whole GPU.

    `spare`: the bytes that nobody but the models had when it was granted; what is missing of them since, jobs took.
    """

    lease: str
    memory: int | None
    since: float = 0.0
    spare: int | None = None


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
    swap_key: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """`running` are the media jobs that were granted, in that order. `has_gpu`: without one, RAM is what all share.

    `stuck`: what models hold that were given up and have not returned.
    """

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
    stuck: Sequence[Need] = ()


@dataclass(frozen=True, slots=True)
class Admit:
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Swap:
    """`model` takes over the engine of `old`, which is idle and is stopped with that."""

    model: str
    old: str


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
    """`spare` as in `Job`."""

    lease: str
    spare: int


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Nothing to do before `at` but what an event brings."""

    at: float


Effect = Admit | Load | Swap | Unload | Drain | Refuse | Grant | LookAgain


def decide(view: View) -> list[Effect]:
    here = {resident.model: resident for resident in view.residents}
    models = [wanted.model for wanted in view.queue if isinstance(wanted, Wanted)]
    usable = [model for model in models if model in here and not here[model].draining]
    effects: list[Effect] = [Admit(model) for model in usable]
    if view.working:
        return effects
    # The calls that are let in now run when the other effects are performed.
    view = replace(view, residents=[replace(r, busy=r.busy or r.model in usable) for r in view.residents])
    dismissed = next((resident for resident in view.residents if resident.dismissed and not resident.busy), None)
    if dismissed is not None:
        return [*effects, Unload(dismissed.model)]
    pending = [each for each in view.queue if isinstance(each, Job) or _has_a_turn(each, here)]
    if (job := _fits_beside(pending, view)) is not None:
        return [*effects, Grant(job.lease, _spare(view))]
    if not pending:
        expired = [Unload(resident.model) for resident in view.residents if _expired(resident, view.now)]
        return [*effects, *_drains(set(), view.residents), *expired[:1]]
    head = pending[0]
    is_here = isinstance(head, Wanted) and head.model in here
    if is_here or any(job.memory is None for job in view.running):
        return [*effects, *_drains(set(), view.residents)]
    return effects + (_serve_job(head, view) if isinstance(head, Job) else _serve_model(head, view))


def _has_a_turn(wanted: Wanted, here: dict[str, Resident]) -> bool:
    """Whether its being the first means anything: a load can begin, or a model that drains can take calls again."""
    resident = here.get(wanted.model)
    return wanted.need is not None if resident is None else resident.draining and not resident.dismissed


def _serve_model(wanted: Wanted, view: View) -> list[Effect]:
    assert wanted.need is not None
    victims = _victims(wanted.need, view, wanted.swap_key)
    if victims is None:
        return [*_drains(set(), view.residents), _refusal(wanted.model, wanted.need, view)]
    if len(victims) == 1 and _swaps(victims[0], wanted.swap_key):
        return _after_draining(Swap(wanted.model, victims[0].model), wanted.since, victims, view)
    # The one to be swapped goes last.
    first = min(victims, key=lambda victim: _swaps(victim, wanted.swap_key), default=None)
    step = Load(wanted.model) if first is None else Unload(first.model)
    return _after_draining(step, wanted.since, victims, view)


def _serve_job(job: Job, view: View) -> list[Effect]:
    if job.memory is None:
        if view.running:
            return _drains(set(), view.residents)
        victims: list[Resident] | None = _others(view)
    else:
        victims = _victims(_as_need(job.memory, view), view)
        if victims is None and view.running:
            return _drains(set(), view.residents)
    if victims is None:  # it states more than the device has: it gets what can be made free, and must see for itself
        victims = _others(view)
    step = Unload(victims[0].model) if victims else Grant(job.lease, _spare(view))
    return _after_draining(step, job.since, victims, view)


def _others(view: View) -> list[Resident]:
    """The models that a job which wants the whole GPU must wait out: all that use it, but for the pinned."""
    return [each for each in view.residents if not each.pinned and (each.need.gpu > 0 or not view.has_gpu)]


def _after_draining(step: Effect, since: float, victims: list[Resident], view: View) -> list[Effect]:
    """`step`, once none of the victims is busy any more."""
    overdue = view.now - since >= view.max_wait_s
    stay_until = max((each.since + view.min_residency_s for each in victims if each.busy), default=0.0)
    if stay_until > view.now and not overdue:
        return [*_drains(set(), view.residents), LookAgain(min(stay_until, since + view.max_wait_s))]
    if any(victim.busy for victim in victims):
        return _drains({each.model for each in victims if each.busy or each.draining}, view.residents)
    return [*_drains(set(), view.residents), step]


def _fits_beside(pending: Sequence[Wanted | Job], view: View) -> Job | None:
    """The first job, if it states its memory and runs now without taking what those before it could have."""
    if any(job.memory is None for job in view.running):
        return None
    here = {resident.model for resident in view.residents}
    left = _free(view)
    for each in pending:
        if isinstance(each, Job):
            return each if each.memory is not None and _fits(_as_need(each.memory, view), left) else None
        if each.need is not None and each.model not in here:
            rest = _less(left, each.need)
            if rest is None:
                return None
            left = rest
    return None


def _drains(wanted: set[str], residents: Sequence[Resident]) -> list[Effect]:
    """What changes so that exactly those models drain, and the dismissed ones."""
    drains = {resident.model: resident.model in wanted or resident.dismissed for resident in residents}
    return [Drain(each.model, on=drains[each.model]) for each in residents if each.draining != drains[each.model]]


def _expired(resident: Resident, now: float) -> bool:
    return not resident.busy and resident.expires_at is not None and resident.expires_at <= now


def _as_need(memory: int, view: View) -> Need:
    return Need(gpu=memory) if view.has_gpu else Need(ram=memory)


def _free(view: View) -> Need:
    """What is free once the running media jobs have taken what they stated."""
    left = _less(view.free, _as_need(_still_to_take(view), view))
    return left if left is not None else Need(ram=0 if not view.has_gpu else view.free.ram, gpu=0)


def _spare(view: View) -> int:
    """Bytes of what all share that are free or the models': it shrinks by what media jobs take, and nothing else."""
    models = [resident.need for resident in view.residents]
    return sum(need.gpu if view.has_gpu else need.ram for need in (view.free, *models, *view.stuck))


def _still_to_take(view: View) -> int:
    """Bytes that the running jobs stated and do not have yet: what they have is measured as no longer free.

    Which job took what cannot be measured. So it is reckoned from each job's grant on, for it and those after it, and
    the highest sum holds: a job that took more than it stated must not use up what a later one still has to take.
    """
    now, stated, most = _spare(view), 0, 0
    for job in reversed(view.running):
        stated += job.memory or 0
        taken = max(0, job.spare - now) if job.spare is not None else 0
        most = max(most, stated - taken)
    return most


def _less(free: Need, need: Need) -> Need | None:
    return Need(free.ram - need.ram, free.gpu - need.gpu) if _fits(need, free) else None


def _fits(need: Need, free: Need) -> bool:
    return need.ram <= free.ram and need.gpu <= free.gpu


def _swaps(resident: Resident, swap_key: str | None) -> bool:
    return swap_key is not None and resident.swap_key == swap_key


def _victims(need: Need, view: View, swap_key: str | None = None) -> list[Resident] | None:
    """The models to unload so that `need` fits, in the order of going; None if that cannot be reached."""
    free, victims = _free(view), list[Resident]()
    # Of the busy ones those that drain already: a drain passed on whenever a call ends would never end.
    candidates = sorted(
        view.residents, key=lambda r: (r.busy, r.busy and not r.draining, not _swaps(r, swap_key), r.last_used)
    )
    for resident in candidates:
        if not resident.pinned and not _fits(need, _plus(free, victims)):
            victims.append(resident)
    if not _fits(need, _plus(free, victims)):
        return None
    for resident in reversed(victims.copy()):  # what is short may be given by the later ones alone
        others = [each for each in victims if each is not resident]
        if _fits(need, _plus(free, others)):
            victims = others
    return victims


def _plus(free: Need, given: Sequence[Resident]) -> Need:
    return Need(free.ram + sum(each.need.ram for each in given), free.gpu + sum(each.need.gpu for each in given))


def _refusal(model: str, need: Need, view: View) -> Effect:
    if view.running:  # a media job is there now; what it leaves free when it goes may be enough
        return LookAgain(view.now + _LOOK_AGAIN_S)
    most = _plus(_free(view), [resident for resident in view.residents if not resident.pinned])
    if need.gpu > most.gpu:
        return Refuse(model, "GPU memory", need.gpu, most.gpu)
    return Refuse(model, "RAM", need.ram, most.ram)


_LOOK_AGAIN_S = 5.0
