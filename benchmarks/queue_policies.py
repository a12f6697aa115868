"""The box in simulated time, and three policies that share it: ours, first-come and greedy (see sim_queue.py)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from citadel.engine import Need
from citadel.runtime.gpu_queue import Effect, Grant, Load, Unload, View
from tests.runtime.registry_model import Call, RegistryModel, Size

GB = 10**9
BOX, SLOTS, LOAD_S, UNLOAD_S = 96 * GB, 8, 20.0, 2.0
GPU = {"A": 60 * GB, "B": 60 * GB, "C": 60 * GB, "D": 30 * GB, "E": 30 * GB}
"""Of A, B and C one fits at a time; D or E fit beside one of them, or all of D and E together."""


@dataclass(eq=False)
class Request:
    """A call of `model`, or a media job (model None) that states `memory`, or wants the whole GPU (None)."""

    member: str
    model: str | None
    memory: int | None
    seconds: float
    asked_at: float = 0.0
    began_at: float = 0.0


@dataclass
class Script:
    """What one caller does: each request is made some seconds after the one before has ended; the first at `start`."""

    start: float
    steps: list[tuple[float, Request]]


class Policy(Protocol):
    loads: int

    def ask(self, request: Request) -> None: ...

    def end(self, request: Request) -> None: ...

    def operation_ends(self) -> None: ...

    def act(self) -> None:
        """Begin whatever can begin now."""
        ...

    def due(self) -> float | None:
        """When to act again though nothing happened."""
        ...


class Simulation:
    """The clock, the callers and what ends when; the policy says what begins."""

    def __init__(self, scripts: Sequence[Script], policy_of: Callable[[Simulation], Policy]) -> None:
        self.now = 0.0
        self.served: list[Request] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._next: dict[Request, Iterator[tuple[float, Request]]] = {}
        self.policy = policy_of(self)
        for script in scripts:
            self._continue(iter(script.steps), script.start)

    def run(self) -> None:
        while self._events or self.policy.due() is not None:
            due = self.policy.due()
            if self._events and (due is None or self._events[0][0] <= due):
                self.now, _, happens = heapq.heappop(self._events)
                happens()
            else:
                assert due is not None
                self.now = due
            self.policy.act()

    def begin(self, request: Request) -> None:
        request.began_at = self.now
        self.served.append(request)
        self.later(request.seconds, lambda: self._end(request))

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happens))

    def operate(self, seconds: float) -> None:
        self.later(seconds, self.policy.operation_ends)

    def _ask(self, request: Request) -> None:
        request.asked_at = self.now
        self.policy.ask(request)

    def _end(self, request: Request) -> None:
        self.policy.end(request)
        self._continue(self._next.pop(request), 0.0)

    def _continue(self, steps: Iterator[tuple[float, Request]], pause_s: float) -> None:
        if (step := next(steps, None)) is not None:
            think_s, request = step
            self._next[request] = steps
            self.later(pause_s + think_s, lambda: self._ask(request))


class Ours:
    """`gpu_queue.decide`, obeyed by the registry's model."""

    def __init__(self, simulation: Simulation, min_residency_s: float, max_wait_s: float) -> None:
        self.loads = 0
        self._simulation = simulation
        self._requests: dict[Call | str, Request] = {}
        self._keys: dict[Request, Call | str] = {}
        self._box = RegistryModel(
            {name: Size(Need(gpu=need), SLOTS) for name, need in GPU.items()},
            Need(gpu=BOX),
            has_gpu=True,
            min_residency_s=min_residency_s,
            max_wait_s=max_wait_s,
            granted=lambda call: simulation.begin(self._requests[call]),
            refused=self._refused,
            performed=self._performed,
        )

    def ask(self, request: Request) -> None:
        self._box.now = self._simulation.now
        key = f"job {len(self._keys)}" if request.model is None else Call(request.model, request.member)
        self._requests[key], self._keys[request] = request, key
        if isinstance(key, str):
            self._box.ask(key, request.memory)
        else:
            self._box.call(key)

    def end(self, request: Request) -> None:
        self._box.now = self._simulation.now
        key = self._keys[request]
        if isinstance(key, str):
            self._box.release(key)
        else:
            self._box.leave(key)

    def operation_ends(self) -> None:
        self._box.now = self._simulation.now
        self._box.operation_ends()

    def act(self) -> None:
        self._box.now = self._simulation.now
        self._box.settle()

    def due(self) -> float | None:
        return self._box.due()

    def _performed(self, _: View, effect: Effect) -> None:
        match effect:
            case Load():
                self.loads += 1
                self._simulation.operate(LOAD_S)
            case Unload():
                self._simulation.operate(UNLOAD_S)
            case Grant(lease=lease):
                self._simulation.begin(self._requests[lease])
            case _:
                pass

    def _refused(self, call: Call) -> None:
        raise AssertionError(f"{call} was refused")


@dataclass
class Plain:
    """What both plain policies stand on: one operation at a time, idle models make room, nothing is cut off."""

    simulation: Simulation
    loads: int = 0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    here: dict[str, float] = field(default_factory=dict)
    """The loaded models, and when each was last used."""
    operation: tuple[str, bool] | None = None
    """The model that is loading (True) or unloading."""

    def ask(self, request: Request) -> None:
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        self.running.remove(request)
        if request.model is not None:
            self.here[request.model] = self.simulation.now

    def operation_ends(self) -> None:
        assert self.operation is not None
        (model, loaded), self.operation = self.operation, None
        if loaded:
            self.here[model] = self.simulation.now

    def due(self) -> float | None:
        return None

    def act(self) -> None:
        raise NotImplementedError

    def users(self, model: str) -> int:
        return sum(request.model == model for request in self.running)

    def free(self) -> int:
        jobs = sum(request.memory or 0 for request in self.running if request.model is None)
        return BOX - jobs - sum(GPU[model] for model in self.here)

    def can_begin(self, request: Request) -> bool:
        """Without a load or an unload."""
        if request.model is not None:
            return request.model in self.here and self.users(request.model) < SLOTS
        if self.operation is not None or any(each.model is None and each.memory is None for each in self.running):
            return False
        if request.memory is not None:
            return request.memory <= self.free()
        return not self.here and not self.running

    def begin(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        self.simulation.begin(request)

    def bring(self, request: Request) -> bool:
        """Take the next step towards its beginning; False if that must wait."""
        whole = request.model is None and request.memory is None
        need = BOX if whole else request.memory if request.model is None else GPU[request.model]
        assert need is not None
        if any(each.model is None and each.memory is None for each in self.running):
            return False
        if request.model is not None and need <= self.free():
            self.loads += 1
            self._operate(request.model, loads=True, seconds=LOAD_S)
            return True
        idle = sorted((model for model in self.here if not self.users(model)), key=self.here.__getitem__)
        if self.free() + sum(GPU[model] for model in idle) < need or not idle:
            return False
        del self.here[idle[0]]
        self._operate(idle[0], loads=False, seconds=UNLOAD_S)
        return True

    def _operate(self, model: str, *, loads: bool, seconds: float) -> None:
        self.operation = (model, loads)
        self.simulation.operate(seconds)


class FirstCome(Plain):
    """Nobody begins before those who came earlier have begun."""

    def act(self) -> None:
        while self.waiting and self.operation is None:
            first = self.waiting[0]
            if self.can_begin(first):
                self.begin(first)
            elif first.model in self.here or not self.bring(first):
                return


class Greedy(Plain):
    """Whatever can begin begins; a model that nobody uses or wants makes room for the longest queue."""

    def act(self) -> None:
        for request in list(self.waiting):
            if self.can_begin(request):
                self.begin(request)
        queues: dict[str | None, list[Request]] = {}
        for request in self.waiting:
            if request.model not in self.here:
                queues.setdefault(request.model, []).append(request)
        for queue in sorted(queues.values(), key=lambda queue: (-len(queue), queue[0].asked_at)):
            if self.operation is None and self.bring(queue[0]):
                return
