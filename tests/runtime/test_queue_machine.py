"""The queue's decision, the slots and the registry's rules together: nobody cut off, nobody forgotten, nothing too big.

Time is a number here. Calls, loads and media jobs end by themselves within the seconds named below, as long as nobody
ends them sooner, so that a bound on every wait can be stated (`bound_s`) and checked.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from citadel.engine import Need
from citadel.runtime.gpu_queue import Drain, Effect, Grant, Load, Refuse, Swap, Unload, View
from tests.runtime.registry_model import Call, RegistryModel, Size

CALL_S, LOAD_S, SWAP_S, UNLOAD_S, HOLD_S = 5.0, 3.0, 0.1, 1.0, 6.0
OPEN_CALLS, OPEN_LEASES = 8, 3
MEMBERS = ("ann", "bob", "eve")
BOX = Need(ram=10, gpu=8)
MODELS = {
    "a": Size(Need(ram=1, gpu=3), slots=2),
    "b": Size(Need(ram=1, gpu=4), slots=1, ttl_s=20.0, swap_key="family"),
    "bb": Size(Need(ram=1, gpu=4), slots=1, swap_key="family"),
    "c": Size(Need(ram=1, gpu=7), slots=2),
    "p": Size(Need(ram=1, gpu=1), slots=2, pinned=True, ttl_s=5.0),
    "r": Size(Need(ram=7), slots=2),
    "s": Size(Need(ram=4), slots=2),
    "giant": Size(Need(ram=1, gpu=9), slots=1),
}
MEMORY = (None, 1, 3, 20)
"""What media jobs state; the last is more than the box has."""


def bound_s(min_residency_s: float) -> float:
    """No ticket waits longer. A turn of the queue is one load or media job, and takes at most:

    the operation under way; the media jobs that run; the minimum residency of the models in the way; the calls on
    them, each model drained once, at worst one call after the other; their unloads; then the load, or the job.
    Everybody who may stand before a call has one turn; then it waits for slots among the calls of its model, which
    members take in turns.
    """
    drained = len(MODELS) * OPEN_CALLS * CALL_S
    turn = LOAD_S + HOLD_S + min_residency_s + drained + len(MODELS) * UNLOAD_S + max(LOAD_S, HOLD_S)
    return (len(MODELS) + OPEN_LEASES) * turn + OPEN_CALLS * len(MEMBERS) * CALL_S


class World:
    """The registry's model with calls and jobs that end, and an eye on everything it does."""

    def __init__(self, *, has_gpu: bool, min_residency_s: float, max_wait_s: float) -> None:
        models = MODELS
        if not has_gpu:
            models = {name: replace(size, need=Need(size.need.gpu), ttl_s=None) for name, size in MODELS.items()}
        self.box = RegistryModel(
            models,
            BOX if has_gpu else Need(ram=BOX.gpu),
            has_gpu=has_gpu,
            min_residency_s=min_residency_s,
            max_wait_s=max_wait_s,
            granted=self._granted,
            refused=self._refused,
            performed=self._performed,
        )
        self.bound_s = bound_s(min_residency_s)
        self.count = itertools.count()
        self.events: list[tuple[float, int, str, Any]] = []
        self.waiting: dict[Call, tuple[int, float, float]] = {}
        """Per call that waits: its number, when it came, and how long it will run."""
        self.calls: dict[Call, float] = {}
        """Calls that run, and when they began."""
        self.leases: dict[str, float] = {}
        """Media jobs that wait, and since when."""
        self.drained: dict[str, int] = {}
        """Since which number each draining model drains."""
        self.ended: set[Call] = set()
        self.load_fails = False
        self.longest_s = 0.0

    # -- what happens

    def call(self, model: str, member: str, n: int, seconds: float) -> Call:
        call = Call(model, member, min(n, self.box.models[model].slots.capacity))
        self.waiting[call] = (next(self.count), self.box.now, seconds)
        self.box.call(call)
        return call

    def end(self, call: Call) -> None:
        """A call ends, or its caller hangs up."""
        assert (call in self.waiting) != (call in self.calls)
        self.waiting.pop(call, None)
        self.calls.pop(call, None)
        self.ended.add(call)
        self.box.leave(call)

    def ask(self, memory: int | None) -> None:
        lease = f"lease {next(self.count)}"
        self.leases[lease] = self.box.now
        self.box.ask(lease, memory)

    def release(self, lease: str) -> None:
        self.leases.pop(lease, None)
        self.box.release(lease)

    def dismiss(self, model: str) -> None:
        self.box.dismiss(model)
        if self.box.models[model].phase == "loaded":
            self.drained.setdefault(model, next(self.count))

    def settle(self) -> None:
        self.box.settle()
        self.check()

    def pass_time(self, seconds: float) -> None:
        """What ends meanwhile ends, one after the other, and the registry looks after each."""
        self.settle()
        until = self.box.now + seconds
        while (at := self._next()) is not None and at <= until:
            self.step()
        self.box.now = until
        self.settle()

    def step(self) -> None:
        """Up to the next thing that ends or is due."""
        self.settle()
        if (at := self._next()) is not None:
            self.box.now = at
            if self.events and self.events[0][0] <= at:
                self._happen(*heapq.heappop(self.events)[2:])
            self.settle()

    def idle(self) -> bool:
        return not (self.waiting or self.calls or self.leases or self.box.running or self.box.operation)

    def _next(self) -> float | None:
        times = [self.events[0][0]] if self.events else []
        due = self.box.due()
        return min([*times, *([] if due is None else [due])], default=None)

    def _happen(self, kind: str, what: Any) -> None:
        if kind == "operation":
            well, self.load_fails = not self.load_fails, False
            self.box.operation_ends(well=well)
        elif kind == "lease":
            self.release(what)
        elif what in self.calls:
            self.end(what)

    def _later(self, seconds: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (self.box.now + seconds, next(self.count), kind, what))

    # -- what is seen

    def _granted(self, call: Call) -> None:
        number, came, seconds = self.waiting.pop(call)
        model = self.box.models[call.model]
        assert model.phase == "loaded"
        assert number < self.drained.get(call.model, number + 1), "came after the drain began"
        self._waited(came)
        self.calls[call] = self.box.now
        self._later(seconds, "call", call)

    def _refused(self, call: Call) -> None:
        self._waited(self.waiting.pop(call)[1])
        self.ended.add(call)
        self.box.leave(call)

    def _waited(self, since: float) -> None:
        self.longest_s = max(self.longest_s, self.box.now - since)
        assert self.box.now - since <= self.bound_s

    def _performed(self, view: View, effect: Effect) -> None:
        match effect:
            case Drain(model=name, on=True):
                self.drained.setdefault(name, next(self.count))
            case Drain(model=name):
                assert not self.box.models[name].dismissed
                self.drained.pop(name, None)
            case Load(model=name):
                self._sees_load(name)
            case Swap(model=name, old=old):
                self._sees_swap(name, old)
            case Unload(model=name):
                self._sees_unload(name)
            case Grant(lease=lease):
                self._sees_grant(lease)
            case Refuse():
                self._sees_refusal(view, effect)
            case _:
                pass

    def _sees_load(self, name: str) -> None:
        need, free = self.box.models[name].need, self.box.free()
        assert self.box.operation is None
        assert need.ram <= free.ram
        assert need.gpu <= free.gpu
        assert all(job.memory is not None for job in self.box.running), "a media job has the whole GPU"
        self._later(LOAD_S, "operation", None)

    def _sees_swap(self, name: str, old: str) -> None:
        new, model = self.box.models[name], self.box.models[old]
        assert self.box.operation is None
        assert model.slots.idle, "calls were cut off"
        assert not model.pinned
        assert new.swap_key == model.swap_key is not None
        assert all(job.memory is not None for job in self.box.running), "a media job has the whole GPU"
        self.drained.pop(old, None)
        self._later(SWAP_S, "operation", None)

    def _sees_unload(self, name: str) -> None:
        model = self.box.models[name]
        assert self.box.operation is None
        assert model.slots.idle, "calls were cut off"
        assert model.dismissed or not model.pinned
        self.drained.pop(name, None)
        self._later(UNLOAD_S, "operation", None)

    def _sees_grant(self, lease: str) -> None:
        (job,) = [each for each in self.box.view().queue if getattr(each, "lease", None) == lease]
        self._waited(self.leases.pop(lease))
        assert self.box.operation is None
        left = self.box.free().gpu if self.box.has_gpu else self.box.free().ram
        uses = [each for each in self.box.residents() if not each.pinned and (each.need.gpu or not self.box.has_gpu)]
        if job.memory is None or job.memory > left:
            assert not uses
            assert not self.box.running
        self._later(HOLD_S, "lease", lease)

    def _sees_refusal(self, view: View, refusal: Refuse) -> None:
        """It holds: with all gone that is not pinned, that kind of memory would still fall short."""
        kind = "gpu" if refusal.kind == "GPU memory" else "ram"
        kept = sum(getattr(each.need, kind) for each in view.residents if each.pinned)
        assert refusal.needed == getattr(self.box.models[refusal.model].need, kind)
        assert refusal.free == getattr(self.box.memory, kind) - kept
        assert refusal.needed > refusal.free

    def check(self) -> None:
        for model in self.box.models.values():
            assert model.draining == (model.name in self.drained)
            assert sum(call.n for call in model.slots.running) <= model.slots.capacity
            assert model.phase == "loaded" or model.slots.idle
        assert {call for model in self.box.models.values() for call in model.slots.running} == set(self.calls)
        assert len(self.ended) == len(self.ended - self.waiting.keys() - self.calls.keys())
        for _, came, _ in self.waiting.values():
            assert self.box.now - came <= self.bound_s


class QueueMachine(RuleBasedStateMachine):
    """Several things may happen before the registry looks: `settles` says whether it does after this one."""

    @initialize(has_gpu=st.booleans(), residency=st.sampled_from([0.0, 4.0]), longest=st.sampled_from([0.0, 2.0, 99.0]))
    def begin(self, has_gpu: bool, residency: float, longest: float) -> None:
        self.world = World(has_gpu=has_gpu, min_residency_s=residency, max_wait_s=longest)

    def _after(self, settles: bool) -> None:
        if settles:
            self.world.settle()

    @precondition(lambda self: len(self.world.waiting) + len(self.world.calls) < OPEN_CALLS)
    @rule(
        model=st.sampled_from(sorted(MODELS)),
        member=st.sampled_from(MEMBERS),
        n=st.integers(1, 2),
        seconds=st.floats(0.1, CALL_S),
        settles=st.booleans(),
    )
    def call(self, model: str, member: str, n: int, seconds: float, settles: bool) -> None:
        self.world.call(model, member, n, seconds)
        self._after(settles)

    @precondition(lambda self: self.world.waiting or self.world.calls)
    @rule(data=st.data(), settles=st.booleans())
    def hang_up(self, data: st.DataObject, settles: bool) -> None:
        self.world.end(data.draw(st.sampled_from([*self.world.waiting, *self.world.calls])))
        self._after(settles)

    @precondition(lambda self: len(self.world.leases) + len(self.world.box.running) < OPEN_LEASES)
    @rule(memory=st.sampled_from(MEMORY), settles=st.booleans())
    def ask(self, memory: int | None, settles: bool) -> None:
        self.world.ask(memory)
        self._after(settles)

    @precondition(lambda self: self.world.leases or self.world.box.running)
    @rule(data=st.data(), settles=st.booleans())
    def release(self, data: st.DataObject, settles: bool) -> None:
        open_ = [*self.world.leases, *(job.lease for job in self.world.box.running)]
        self.world.release(data.draw(st.sampled_from(open_)))
        self._after(settles)

    @rule(model=st.sampled_from(sorted(MODELS)), settles=st.booleans())
    def dismiss(self, model: str, settles: bool) -> None:
        self.world.dismiss(model)
        self._after(settles)

    @rule(model=st.sampled_from(sorted(MODELS)), pinned=st.booleans())
    def pin(self, model: str, pinned: bool) -> None:
        self.world.box.models[model].pinned = pinned

    @rule()
    def next_load_fails(self) -> None:
        operation = self.world.box.operation
        self.world.load_fails = operation is not None and operation.phase == "starting"

    @rule(seconds=st.floats(0.1, 15.0))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def slots_and_drains_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Nobody comes any more: everybody is served within the bound, and nothing is left."""
        if hasattr(self, "world"):
            self.world.pass_time(self.world.bound_s)
            assert self.world.idle()
            assert not self.world.box.queue


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


LOOPS = st.tuples(st.sampled_from("abcr"), st.sampled_from(MEMBERS), st.integers(1, 2), st.floats(0.5, CALL_S))


@settings(max_examples=25, deadline=None)
@given(
    loops=st.lists(LOOPS, min_size=2, max_size=OPEN_CALLS),
    jobs=st.lists(st.sampled_from(MEMORY), max_size=1),
    has_gpu=st.booleans(),
    min_residency_s=st.sampled_from([0.0, 4.0]),
)
def test_nobody_starves_under_calls_that_never_stop_coming(
    loops: list[tuple[str, str, int, float]], jobs: list[int | None], has_gpu: bool, min_residency_s: float
) -> None:
    """Each caller asks again the moment it was served, and so do media jobs.

    At most one call per caller is drained in a turn, and each of the models they want has one turn, each job another.
    """
    world = World(has_gpu=has_gpu, min_residency_s=min_residency_s, max_wait_s=60.0)
    models = len({model for model, *_ in loops})
    all_calls_s = sum(seconds for *_, seconds in loops)
    turn_s = LOAD_S + HOLD_S + min_residency_s + all_calls_s + models * UNLOAD_S + max(LOAD_S, HOLD_S)
    world.bound_s = (models + len(jobs)) * turn_s + len(MEMBERS) * all_calls_s
    calls: list[Call | None] = [None] * len(loops)
    while world.box.now < 3 * world.bound_s:
        for index, loop in enumerate(loops):
            if calls[index] is None or calls[index] in world.ended:
                calls[index] = world.call(*loop)
        if jobs and not world.leases and not world.box.running:
            world.ask(jobs[0])
        world.step()
