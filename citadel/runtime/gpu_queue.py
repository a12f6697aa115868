"""What to do next with the box's memory: a pure decision over a picture of the registry, returned as effects.

One queue orders the loads. The decision, in order:
 1. A wanted model that is loaded and not draining is admitted: its calls go to its slots.
 2. While a load or an unload is under way, nothing else begins: memory can only be measured at rest.
 3. A dismissed model that is idle is unloaded.
 4. With nothing wanted, draining models take calls again, and idle ones past their time to live are unloaded.
 5. The first of the queue whose need is known is loaded if it fits into what is free.
 6. Else room is made: idle models go first, least recently used first, then busy ones, which are drained and never
    cut off. Nothing idle is unloaded before the busy ones have drained, so it can answer until then.
 7. If all of that would not be enough, it is refused with both numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from citadel.engine import Need


@dataclass(frozen=True, slots=True)
class Wanted:
    """A load that somebody waits for. `need` is None while the weights are still being looked at or fetched."""

    model: str
    need: Need | None


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model. `expires_at` is when its idle time to live ends; times on the monotonic clock.

    `dismissed`: somebody asked for its unloading.
    """

    model: str
    need: Need
    busy: bool
    draining: bool
    dismissed: bool
    pinned: bool
    last_used: float
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class View:
    queue: Sequence[Wanted]
    residents: Sequence[Resident]
    free: Need
    working: bool
    """A load or an unload is under way."""
    now: float


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


Effect = Admit | Load | Unload | Drain | Refuse


def decide(view: View) -> list[Effect]:
    here = {resident.model: resident for resident in view.residents}
    usable = [wanted.model for wanted in view.queue if wanted.model in here and not here[wanted.model].draining]
    effects: list[Effect] = [Admit(model) for model in usable]
    if view.working:
        return effects
    dismissed = next((resident for resident in view.residents if resident.dismissed and not resident.busy), None)
    if dismissed is not None:
        return [*effects, Unload(dismissed.model)]
    pending = [wanted for wanted in view.queue if wanted.model not in usable]
    head = next((wanted for wanted in pending if wanted.need is not None and wanted.model not in here), None)
    if head is None or head.need is None:
        effects += _drains(set(), view.residents)
        effects += [Unload(resident.model) for resident in view.residents if _expired(resident, view.now)][:1]
        return effects
    victims = _victims(head.need, view)
    if victims is None:
        return [*effects, _refusal(head.model, head.need, view)]
    return effects + _make_room(head.model, victims, view.residents)


def _make_room(model: str, victims: list[Resident], residents: Sequence[Resident]) -> list[Effect]:
    busy = {victim.model for victim in victims if victim.busy}
    effects = _drains(busy, residents)
    if not victims:
        effects.append(Load(model))
    elif not busy:
        effects.append(Unload(victims[0].model))
    return effects


def _drains(busy: set[str], residents: Sequence[Resident]) -> list[Effect]:
    """What changes so that exactly those models drain, and the dismissed ones."""
    wanted = {resident.model: resident.model in busy or resident.dismissed for resident in residents}
    return [Drain(each.model, on=wanted[each.model]) for each in residents if each.draining != wanted[each.model]]


def _expired(resident: Resident, now: float) -> bool:
    return not resident.busy and resident.expires_at is not None and resident.expires_at <= now


def _fits(need: Need, free: Need) -> bool:
    return need.ram <= free.ram and need.gpu <= free.gpu


def _victims(need: Need, view: View) -> list[Resident] | None:
    """The models to unload so that `need` fits, in the order of going; None if that cannot be reached."""
    free, victims = view.free, list[Resident]()
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


def _refusal(model: str, need: Need, view: View) -> Refuse:
    given = [resident.need for resident in view.residents if not resident.pinned]
    ram = view.free.ram + sum(each.ram for each in given)
    gpu = view.free.gpu + sum(each.gpu for each in given)
    return Refuse(model, "GPU memory", need.gpu, gpu) if need.gpu > gpu else Refuse(model, "RAM", need.ram, ram)
