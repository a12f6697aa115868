"""Slots are never oversubscribed, members take turns, and a large call comes to its turn."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from citadel.runtime.slots import Slots


def test_members_take_turns_and_a_member_is_served_in_order() -> None:
    slots: Slots[str] = Slots(1)
    assert slots.enter("a1", "a", 1) == ["a1"]
    for call in ("a2", "a3", "a4"):
        assert slots.enter(call, "a", 1) == []
    assert slots.enter("b1", "b", 1) == []
    served = ["a1"]
    while slots.running:
        served += slots.leave(served[-1])
    assert served == ["a1", "a2", "b1", "a3", "a4"]


def test_sixty_four_calls_of_one_member_do_not_starve_another() -> None:
    slots: Slots[str] = Slots(2)
    for number in range(64):
        slots.enter(f"a{number}", "a", 1)
    slots.enter("b", "b", 1)
    assert slots.leave("a0") == ["a2"]
    assert slots.leave("a1") == ["b"]


def test_a_call_of_several_choices_waits_for_all_its_slots_and_is_not_overtaken() -> None:
    slots: Slots[str] = Slots(2)
    slots.enter("small", "a", 1)
    assert slots.enter("large", "b", 2) == []
    assert slots.enter("later", "c", 1) == []
    assert slots.leave("small") == ["large"]
    assert slots.leave("large") == ["later"]


def test_a_caller_that_leaves_the_queue_lets_the_next_one_in() -> None:
    slots: Slots[str] = Slots(2)
    slots.enter("small", "a", 1)
    slots.enter("large", "b", 2)
    slots.enter("next", "c", 1)
    assert slots.leave("large") == ["next"]
    assert slots.leave("unknown") == []


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots: Slots[int] = Slots(4)
        self.wanted: dict[int, int] = {}
        self.member: dict[int, str] = {}
        self.granted: set[int] = set()
        self.served_before: dict[str, Counter[str]] = {}
        """Per member that waits: how often each other one was served since it began to wait, or was served itself."""
        self.count = 0

    @rule(member=st.sampled_from("abc"), n=st.integers(1, 4))
    def enter(self, member: str, n: int) -> None:
        self.count += 1
        self.wanted[self.count], self.member[self.count] = n, member
        self.served_before.setdefault(member, Counter())
        self._grant(self.slots.enter(self.count, member, n))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.wanted:
            self._leave(data.draw(st.sampled_from(sorted(self.wanted))))

    def _leave(self, call: int) -> None:
        del self.wanted[call]
        self.granted.discard(call)
        self._forget_who_waits_no_more()
        self._grant(self.slots.leave(call))

    def _grant(self, calls: list[int]) -> None:
        for call in calls:
            assert call in self.wanted
            assert call not in self.granted
            member = self.member[call]
            assert call == min(self._waiting_of(member)), "a member's calls are served in their order"
            self.granted.add(call)
            for served in self.served_before.values():
                served[member] += 1
            if member in self.served_before:
                self.served_before[member] = Counter()
        self._forget_who_waits_no_more()

    def _waiting_of(self, member: str) -> list[int]:
        return [call for call in self.wanted if self.member[call] == member and call not in self.granted]

    def _forget_who_waits_no_more(self) -> None:
        for member in list(self.served_before):
            if not self._waiting_of(member):
                del self.served_before[member]

    @invariant()
    def nobody_is_served_twice_while_another_member_waits(self) -> None:
        for served in self.served_before.values():
            assert max(served.values(), default=0) <= 1

    @invariant()
    def never_oversubscribed(self) -> None:
        assert sum(self.wanted[call] for call in self.granted) + self.slots.free == 4
        assert self.slots.free >= 0
        assert set(self.slots.running) == self.granted
        assert set(self.slots.waiting) == self.wanted.keys() - self.granted

    @invariant()
    def nobody_waits_on_an_idle_model(self) -> None:
        assert self.slots.free < 4 or not self.slots.waiting

    def teardown(self) -> None:
        for call in list(self.wanted):
            self._leave(call)
        assert self.slots.idle


TestSlotsMachine = SlotsMachine.TestCase
