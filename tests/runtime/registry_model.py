"""The registry without engines, threads or a clock: who waits, what is loaded, and `gpu_queue.decide` obeyed.

It keeps the registry's own rules (who enters a queue, what an effect does), so that a test or a simulation can replay
hours in a moment. Its user moves `now`, and says when calls, operations and media jobs end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from citadel.engine import Need
from citadel.runtime.gpu_queue import (
    Admit,
    Drain,
    Effect,
    Grant,
    Job,
    Load,
    LookAgain,
    Refuse,
    Resident,
    Swap,
    Unload,
    View,
    Wanted,
    decide,
)
from citadel.runtime.slots import Slots

Phase = Literal["stopped", "starting", "loaded", "unloading"]


@dataclass(eq=False)
class Call:
    model: str
    member: str
    n: int = 1


@dataclass(eq=False)
class Model:
    name: str
    need: Need
    slots: Slots[Call]
    pinned: bool = False
    ttl_s: float | None = None
    phase: Phase = "stopped"
    waiting: dict[Call, None] = field(default_factory=dict)
    asked_at: float = 0.0
    since: float = 0.0
    last_used: float = 0.0
    draining: bool = False
    dismissed: bool = False
    swap_key: str | None = None


@dataclass(frozen=True)
class Size:
    """How large a model is and how many run on it."""

    need: Need
    slots: int
    pinned: bool = False
    ttl_s: float | None = None
    swap_key: str | None = None


class RegistryModel:
    """`granted` and `refused` tell of calls, `performed` of each effect and the view it was decided on."""

    def __init__(
        self,
        models: Mapping[str, Size],
        memory: Need,
        *,
        has_gpu: bool,
        min_residency_s: float = 0.0,
        max_wait_s: float = 0.0,
        granted: Callable[[Call], None],
        refused: Callable[[Call], None],
        performed: Callable[[View, Effect], None],
    ) -> None:
        self.models = {
            name: Model(name, size.need, Slots(size.slots), size.pinned, size.ttl_s, swap_key=size.swap_key)
            for name, size in models.items()
        }
        self.memory, self.has_gpu = memory, has_gpu
        self.min_residency_s, self.max_wait_s = min_residency_s, max_wait_s
        self.granted, self.refused, self.performed = granted, refused, performed
        self.now = 0.0
        self.queue: list[Model | Job] = []
        self.running: list[Job] = []
        self.operation: Model | None = None
        """The model that is loading or unloading."""
        self.swapped: Model | None = None
        """The one whose engine the loading model takes over."""
        self.look_again_at: float | None = None

    # -- what happens to it

    def call(self, call: Call) -> None:
        model = self.models[call.model]
        if model.phase == "loaded" and not model.draining and not model.waiting:
            self._grant(model.slots.enter(call, call.member, call.n))
        else:
            model.waiting[call] = None
            self._want(model)

    def leave(self, call: Call) -> None:
        """It has ended, or its caller hung up."""
        model = self.models[call.model]
        model.waiting.pop(call, None)
        if model.phase == "loaded":
            self._grant(model.slots.leave(call))
            model.last_used = self.now

    def ask(self, lease: str, memory: int | None) -> None:
        self.queue.append(Job(lease, memory, self.now))

    def release(self, lease: str) -> None:
        """It has ended, or gave its place up."""
        self.running = [job for job in self.running if job.lease != lease]
        self.queue = [each for each in self.queue if isinstance(each, Model) or each.lease != lease]

    def dismiss(self, name: str) -> None:
        model = self.models[name]
        if model.phase == "loaded":
            model.dismissed = model.draining = True

    def operation_ends(self, *, well: bool = True) -> None:
        model, self.operation = self.operation, None
        assert model is not None
        if self.swapped is not None:
            self.swapped.phase, self.swapped = "stopped", None
        if model.phase == "unloading":
            model.phase = "stopped"
        elif well:
            model.phase = "loaded"
            model.since = model.last_used = self.now
            self._admit(model)
        else:
            model.phase = "stopped"
            self._refuse(model)

    # -- what it does

    def settle(self) -> None:
        """Decide and act until nothing changes any more."""
        for _ in range(1000):
            self.queue = [each for each in self.queue if isinstance(each, Job) or each.waiting]
            view = self.view()
            effects = decide(view)
            self.look_again_at = None
            for effect in effects:
                self.performed(view, effect)
                self._perform(effect)
            if all(isinstance(effect, LookAgain) for effect in effects):
                return
        raise AssertionError(f"decided without end: {effects}")

    def due(self) -> float | None:
        """When to settle again though nothing happened."""
        expiring = [each.expires_at for each in self.residents() if each.expires_at is not None and not each.busy]
        times = [*expiring, *([] if self.look_again_at is None else [self.look_again_at])]
        return min((at for at in times if at > self.now), default=None)

    def view(self) -> View:
        return View(
            queue=[
                each if isinstance(each, Job) else Wanted(each.name, each.need, each.asked_at, each.swap_key)
                for each in self.queue
            ],
            residents=self.residents(),
            running=tuple(self.running),
            free=self.free(),
            has_gpu=self.has_gpu,
            working=self.operation is not None,
            now=self.now,
            min_residency_s=self.min_residency_s,
            max_wait_s=self.max_wait_s,
        )

    def free(self) -> Need:
        """As a box measures it: less what models and media jobs have taken, here all that they said."""
        there = [model.need for model in self.models.values() if model.phase != "stopped" and model is not self.swapped]
        jobs = sum(job.memory or 0 for job in self.running)
        ram = self.memory.ram - sum(need.ram for need in there) - (0 if self.has_gpu else jobs)
        gpu = self.memory.gpu - sum(need.gpu for need in there) - (jobs if self.has_gpu else 0)
        return Need(max(ram, 0), max(gpu, 0))

    def residents(self) -> list[Resident]:
        return [_resident(model) for model in self.models.values() if model.phase == "loaded"]

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Grant(lease=lease, spare=spare):
                (job,) = [each for each in self.queue if isinstance(each, Job) and each.lease == lease]
                self.queue.remove(job)
                self.running.append(replace(job, spare=spare))
            case LookAgain(at=at):
                self.look_again_at = at
            case Admit(model=name):
                self._admit(self.models[name])
            case Load(model=name):
                self.queue.remove(self.models[name])
                self._begin(self.models[name], "starting")
            case Swap(model=name, old=old):
                self.queue.remove(self.models[name])
                self.swapped = self.models[old]
                self.swapped.phase, self.swapped.draining = "unloading", False
                self._begin(self.models[name], "starting")
            case Unload(model=name):
                self.models[name].dismissed = self.models[name].draining = False
                self._begin(self.models[name], "unloading")
            case Drain(model=name, on=on):
                self.models[name].draining = on
            case Refuse(model=name):
                self.queue.remove(self.models[name])
                self._refuse(self.models[name])

    def _begin(self, model: Model, phase: Phase) -> None:
        model.phase = phase
        self.operation = model

    def _want(self, model: Model) -> None:
        if model.phase != "starting" and model not in self.queue:
            model.asked_at = self.now
            self.queue.append(model)

    def _admit(self, model: Model) -> None:
        assert model.phase == "loaded"
        if model in self.queue:
            self.queue.remove(model)
        calls, model.waiting = list(model.waiting), {}
        for call in calls:
            self._grant(model.slots.enter(call, call.member, call.n))

    def _grant(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self.granted(call)

    def _refuse(self, model: Model) -> None:
        calls, model.waiting = list(model.waiting), {}
        for call in calls:
            self.refused(call)


def _resident(model: Model) -> Resident:
    resident = Resident(
        model=model.name,
        need=model.need,
        busy=not model.slots.idle,
        draining=model.draining,
        dismissed=model.dismissed,
        pinned=model.pinned,
        since=model.since,
        last_used=model.last_used,
        expires_at=None,
        swap_key=model.swap_key,
    )
    if model.ttl_s is None or model.pinned:
        return resident
    return replace(resident, expires_at=model.last_used + model.ttl_s)
