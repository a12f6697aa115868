"""The ledger: each limit, what a call counts for however it ends, days that only go forward, windows that slide."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from citadel.accounts.auth import Account, KeyLimits, MemberLimits
from citadel.accounts.quota import DAY_S, Defaults, Ledger, Now, Reservation, Settlement, Tally
from citadel.errors import (
    BadRequest,
    CitadelError,
    ContextLengthExceeded,
    DailyLimit,
    DailyTokens,
    DeviceBusy,
    EngineRestarted,
    InsufficientMemory,
    LlmUnavailable,
    ParallelUnsupported,
    RateLimited,
    TooManyParallel,
    TooManyStreams,
)


@dataclass
class Clock:
    now: Now = field(default_factory=lambda: Now(monotonic=1000.0, day=20_000, day_left_s=3600.0))

    def __call__(self) -> Now:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now = replace(self.now, monotonic=self.now.monotonic + seconds)


@dataclass
class Written:
    """The journal as a list."""

    began: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    ended: list[tuple[str, int, int, Settlement]] = field(default_factory=list[tuple[str, int, int, Settlement]])

    def call_began(self, call: str, account: Account, model: str, day: int) -> None:
        self.began.append((call, day))

    def call_ended(self, call: str, account: Account, model: str, began: int, ended: int, counts: Settlement) -> None:
        self.ended.append((call, began, ended, counts))


DEFAULTS = Defaults(open_calls=96, open_per_member=64)


def ledger(clock: Clock | None = None, journal: Written | None = None, **limits: int) -> Ledger:
    return Ledger(replace(DEFAULTS, **limits), clock or Clock(), journal or Written(), Tally())


def account(member: str = "ann", key: str = "k1", **limits: int) -> Account:
    own = {name: value for name, value in limits.items() if name in KeyLimits.__slots__}
    theirs = {name: value for name, value in limits.items() if name not in own}
    return Account(member, key, frozenset({"llm"}), KeyLimits(**own), MemberLimits(**theirs))


def call(
    books: Ledger,
    who: Account,
    *,
    tokens: int = 0,
    error: BaseException | None = None,
    stage: str = "answering",
    model: str = "m",
    parallel: int | None = None,
) -> None:
    """One call, that ends at `stage` with `error`, or well."""
    stages = ["prompt", "model", "slot", "answering"]
    reached = stages.index(stage)
    with books.reserve("id", who, model, parallel) as reservation:
        reservation.prompt_ready = reached >= 1
        reservation.model_ready = reached >= 2
        reservation.answering = reached >= 3
        reservation.completion_tokens = tokens
        if error is not None:
            raise error


def test_open_calls_over_all_and_per_member() -> None:
    books = ledger(open_calls=3, open_per_member=2)
    ann, bob = account("ann"), account("bob", "k2")
    with books.reserve("1", ann, "m", None), books.reserve("2", ann, "m", None):
        with pytest.raises(TooManyStreams) as caught:
            call(books, ann)
        assert caught.value.fields == {"limit": 2}
        with books.reserve("3", bob, "m", None), pytest.raises(DeviceBusy):
            call(books, bob)
    call(books, ann)
    assert books.open_calls == 0


@pytest.mark.parametrize(("bound", "error"), [(1, ParallelUnsupported), (2, TooManyParallel)])
def test_calls_at_once_per_member_and_model(bound: int, error: type[CitadelError]) -> None:
    books, ann = ledger(), account("ann")
    opened = [books.reserve(str(number), ann, "m", bound) for number in range(bound)]
    for each in opened:
        each.__enter__()
    with pytest.raises(error) as caught:
        call(books, ann, parallel=bound)
    assert caught.value.fields == {"max_parallel": bound}
    call(books, ann, model="other", parallel=bound)
    call(books, account("bob", "k2"), parallel=bound)
    for each in opened:
        each.__exit__(None, None, None)
    call(books, ann, parallel=bound)


def test_a_members_own_bound_goes_before_the_models() -> None:
    books, ann = ledger(), account("ann", max_parallel=2)
    with books.reserve("1", ann, "m", 1), books.reserve("2", ann, "m", 1), pytest.raises(TooManyParallel):
        call(books, ann, parallel=1)


def test_calls_in_a_sliding_minute() -> None:
    clock = Clock()
    books, ann = ledger(clock, calls_per_minute=2), account()
    call(books, ann)
    clock.pass_s(50)
    call(books, ann)
    with pytest.raises(RateLimited) as caught:
        call(books, ann)
    assert caught.value.retry_after_s == 10
    clock.pass_s(9.5)
    with pytest.raises(RateLimited) as caught:
        call(books, ann)
    assert caught.value.retry_after_s == 1
    clock.pass_s(0.6)
    call(books, ann)
    call(books, account(key="another of hers"))


def test_calls_in_a_sliding_day() -> None:
    clock = Clock()
    books, ann = ledger(clock), account(calls_per_day=1)
    call(books, ann)
    clock.pass_s(DAY_S - 5)
    with pytest.raises(RateLimited) as caught:
        call(books, ann)
    assert caught.value.retry_after_s == 5
    clock.pass_s(5)
    call(books, ann)


def test_calls_of_the_utc_day() -> None:
    clock = Clock()
    books, ann = ledger(clock, daily_calls=1), account()
    call(books, ann)
    with pytest.raises(DailyLimit) as caught:
        call(books, ann)
    assert (caught.value.fields, caught.value.retry_after_s) == ({"limit": 1, "used": 1}, 3600)
    clock.now = Now(clock.now.monotonic + 3600, 20_001, DAY_S)
    call(books, ann)


def test_tokens_of_the_utc_day_overshoot_only_by_what_is_in_flight() -> None:
    clock = Clock()
    books, ann = ledger(clock, daily_tokens=100), account()
    call(books, ann, tokens=60)
    call(books, ann, tokens=60)
    with pytest.raises(DailyTokens) as caught:
        call(books, account(key="another of hers"))
    assert (caught.value.fields, caught.value.retry_after_s) == ({"limit": 100, "used": 120}, 3600)
    clock.now = Now(clock.now.monotonic + 3600, 20_001, DAY_S)
    call(books, ann)


def test_a_clock_that_steps_back_opens_no_day_again() -> None:
    clock = Clock()
    books, ann = ledger(clock, daily_calls=1), account()
    call(books, ann)
    clock.now = replace(clock.now, day=19_999)
    with pytest.raises(DailyLimit):
        call(books, ann)
    clock.now = replace(clock.now, day=20_000)
    with pytest.raises(DailyLimit):
        call(books, ann)


def test_a_clock_that_steps_over_midnight_starts_one_day() -> None:
    clock, journal = Clock(), Written()
    books, ann = ledger(clock, journal, daily_calls=1), account()
    call(books, ann)
    clock.now = replace(clock.now, day=20_005)
    call(books, ann)
    with pytest.raises(DailyLimit):
        call(books, ann)
    assert [day for _, day in journal.began] == [20_000, 20_005]


def test_a_call_over_midnight_is_the_first_days_and_its_tokens_are_the_seconds() -> None:
    clock, journal = Clock(), Written()
    books, ann = ledger(clock, journal, daily_calls=1, daily_tokens=10), account()
    with books.reserve("id", ann, "m", None) as reservation:
        reservation.answering = True
        reservation.completion_tokens = 10
        clock.now = replace(clock.now, day=20_001)
    assert journal.ended[0][1:3] == (20_000, 20_001)
    with pytest.raises(DailyTokens):
        call(books, ann)


ENDINGS = {
    "well": (None, "answering", True, True),
    "the prompt is too long": (ContextLengthExceeded(1, 2), "prompt", False, False),
    "the engine knows better how long is too long": (ContextLengthExceeded(1, 2), "slot", False, False),
    "the template refuses": (BadRequest("no"), "prompt", False, False),
    "the weights are missing": (LlmUnavailable("m", "no file"), "prompt", False, True),
    "no memory": (InsufficientMemory("m", "RAM", 2, 1), "model", False, True),
    "hung up while it loads": (asyncio.CancelledError(), "model", False, True),
    "hung up while it waits for a slot": (asyncio.CancelledError(), "slot", True, True),
    "the engine refuses a field": (BadRequest("no"), "slot", True, True),
    "the engine dies before the first token": (EngineRestarted("m", "x"), "slot", False, True),
    "the engine dies in the answer": (EngineRestarted("m", "x"), "answering", True, True),
    "hung up in the answer": (GeneratorExit(), "answering", True, True),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_a_call_counts_for(ending: str) -> None:
    error, stage, keeps_call, keeps_window = ENDINGS[ending]
    journal = Written()
    books, ann = ledger(journal=journal, daily_calls=100, calls_per_minute=100), account()
    with nullcontext() if error is None else pytest.raises(type(error)):
        call(books, ann, error=error, stage=stage)
    settled = journal.ended[0][3]
    assert (settled.keeps_call, settled.keeps_window) == (keeps_call, keeps_window)
    left = books.requests_left(ann)
    assert left is not None
    assert left.remaining == (99 if keeps_call or keeps_window else 100)
    assert books.open_calls == 0


def test_tokens_made_are_charged_though_the_caller_left() -> None:
    books, ann = ledger(daily_tokens=100), account()
    with pytest.raises(GeneratorExit):
        call(books, ann, tokens=30, error=GeneratorExit())
    left = books.tokens_left(ann)
    assert left is not None
    assert left.remaining == 70


def test_a_refusal_counts_for_nothing() -> None:
    journal = Written()
    books, ann = ledger(journal=journal, daily_calls=1), account()
    call(books, ann)
    for _ in range(3):
        with pytest.raises(DailyLimit) as caught:
            call(books, ann)
        assert caught.value.fields["used"] == 1
    assert len(journal.began) == 1


def test_what_was_counted_before_a_restart_counts() -> None:
    tally = Tally(20_000, Counter({"k1": 1}), Counter({"ann": 5}), {"k1": [70.0, 50.0]})
    books = Ledger(replace(DEFAULTS, daily_calls=3, calls_per_minute=2), Clock(), Written(), tally)
    call(books, account())
    with pytest.raises(RateLimited) as caught:
        call(books, account())
    assert caught.value.retry_after_s == 10
    assert books.requests_left(account()).remaining == 0  # type: ignore[union-attr]


def test_the_headers_tell_the_tightest_limit() -> None:
    clock = Clock()
    books, ann = ledger(clock, calls_per_minute=10, daily_calls=5, daily_tokens=100), account(calls_per_day=8)
    assert books.requests_left(account()) is not None
    call(books, ann, tokens=30)
    requests, tokens = books.requests_left(ann), books.tokens_left(ann)
    assert (requests.limit, requests.remaining, requests.reset_s) == (5, 4, 3600)  # type: ignore[union-attr]
    assert (tokens.limit, tokens.remaining, tokens.reset_s) == (100, 70, 3600)  # type: ignore[union-attr]
    assert ledger().requests_left(ann.__class__("x", "k", frozenset())) is None


@dataclass
class Open:
    """A call that the machine has open."""

    who: Account
    block: AbstractContextManager[Reservation]
    reservation: Reservation
    day: int
    at: float


class LedgerMachine(RuleBasedStateMachine):
    """Against the simplest possible book-keeping: lists of what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.journal = Clock(), Written()
        limits = {"open_calls": 4, "open_per_member": 3, "calls_per_minute": 5, "daily_calls": 20, "daily_tokens": 100}
        self.books = ledger(self.clock, self.journal, **limits)
        self.open: list[Open] = []
        self.window: list[tuple[str, float]] = []
        self.days: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.day = self.clock.now.day

    @rule(member=st.sampled_from("ab"))
    def begin(self, member: str) -> None:
        who, at = account(member, f"key-{member}"), self.clock.now.monotonic
        allowed = (
            len(self.open) < 4
            and sum(each.who.member == member for each in self.open) < 3
            and sum(key == who.key_id and then > at - 60 for key, then in self.window) < 5
            and self.days[who.key_id, self.day] < 20
            and self.tokens[member, self.day] < 100
        )
        block = self.books.reserve("id", who, "m", None)
        if not allowed:
            with pytest.raises(CitadelError):
                block.__enter__()
            return
        self.open.append(Open(who, block, block.__enter__(), self.day, at))
        self.window.append((who.key_id, at))
        self.days[who.key_id, self.day] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ending=st.sampled_from(sorted(ENDINGS)), tokens=st.integers(0, 60))
    def end(self, data: st.DataObject, ending: str, tokens: int) -> None:
        self._end(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))), ending, tokens)

    def _end(self, each: Open, ending: str, tokens: int) -> None:
        error, stage, keeps_call, keeps_window = ENDINGS[ending]
        reached = ["prompt", "model", "slot", "answering"].index(stage)
        each.reservation.prompt_ready, each.reservation.model_ready = reached >= 1, reached >= 2
        if reached == 3:
            each.reservation.answering, each.reservation.completion_tokens = True, tokens
            self.tokens[each.who.member, self.day] += tokens
        assert not each.block.__exit__(type(error) if error else None, error, None)
        if not keeps_call and each.day == self.day:
            self.days[each.who.key_id, self.day] -= 1
        if not keeps_window:
            self.window.remove((each.who.key_id, each.at))

    @rule(seconds=st.floats(0.001, 100))
    def time_passes(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @rule(days=st.integers(-2, 2))
    def the_wall_clock_jumps(self, days: int) -> None:
        self.clock.now = replace(self.clock.now, day=self.clock.now.day + days)
        self.day = max(self.day, self.clock.now.day)

    @invariant()
    def never_more_open_than_allowed(self) -> None:
        assert self.books.open_calls == len(self.open) <= 4

    @invariant()
    def every_call_ends_once(self) -> None:
        assert len(self.journal.began) - len(self.journal.ended) == len(self.open)

    @invariant()
    def what_is_left_is_what_was_not_used(self) -> None:
        for member in "ab":
            who, recent = account(member, f"key-{member}"), self.clock.now.monotonic - 60
            used = sum(key == who.key_id and then > recent for key, then in self.window)
            requests, tokens = self.books.requests_left(who), self.books.tokens_left(who)
            assert requests is not None
            assert tokens is not None
            assert requests.remaining == min(5 - used, 20 - self.days[who.key_id, self.day])
            assert tokens.remaining == max(0, 100 - self.tokens[member, self.day])

    def teardown(self) -> None:
        for each in self.open:
            self._end(each, "well", 0)
        assert self.books.open_calls == 0


TestLedgerMachine = LedgerMachine.TestCase
