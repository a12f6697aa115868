"""What an account may still do: counting, without a clock or a database of its own.

`Ledger.reserve` is step 8 of a call: it refuses, changing nothing, or counts the call. What the call then turns out to
be is told to its `Reservation`, and settled when the `with` block ends, however it ends. Whatever changes is handed to
`Journal`, which writes it down.

Days are UTC's and only ever go forward: a clock that steps back does not open a day again. The sliding windows run on
the monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Protocol, TypeVar

from citadel.accounts.auth import Account
from citadel.errors import (
    BadRequest,
    CitadelError,
    ContextLengthExceeded,
    DailyLimit,
    DailyTokens,
    DeviceBusy,
    ParallelUnsupported,
    RateLimited,
    TooManyParallel,
    TooManyStreams,
)

K = TypeVar("K", bound=Hashable)

MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Now:
    """`monotonic` in seconds; `day` is the number of the UTC day; `day_left_s` until it ends."""

    monotonic: float
    day: int
    day_left_s: float


class Clock(Protocol):
    def __call__(self) -> Now: ...


class Journal(Protocol):
    """Where the ledger writes. Nothing here waits; what is written is kept even if the process is killed."""

    def call_began(self, call: str, account: Account, model: str, day: int) -> None: ...

    def call_ended(
        self, call: str, account: Account, model: str, began: int, ended: int, counts: Settlement
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Settlement:
    """`keeps_call`: it counts against the day. `keeps_window`: it counts against the sliding windows."""

    keeps_call: bool
    keeps_window: bool
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Tally:
    """What was counted before this process: calls by key and tokens by member of `day`, and each call's age."""

    day: int = 0
    calls: Counter[str] = field(default_factory=Counter[str])
    tokens: Counter[str] = field(default_factory=Counter[str])
    ages_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@dataclass(frozen=True, slots=True)
class Defaults:
    """`[limits]` of models.toml. None is no limit."""

    open_calls: int
    open_per_member: int
    calls_per_minute: int | None = None
    calls_per_day: int | None = None
    daily_calls: int | None = None
    daily_tokens: int | None = None
    max_parallel: int | None = None


@dataclass(eq=False, slots=True)
class Reservation:
    """What a call has come to so far. The stages are those of the contract's list of steps."""

    prompt_ready: bool = False
    model_ready: bool = False
    answering: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Remaining:
    """One limit's state, for the x-ratelimit headers: `reset_s` until all of it is there again."""

    limit: int
    remaining: int
    reset_s: float


class Ledger:
    def __init__(self, defaults: Defaults, clock: Clock, journal: Journal, tally: Tally) -> None:
        self.defaults = defaults
        self._clock = clock
        self._journal = journal
        self._day = tally.day
        self._calls = tally.calls
        self._tokens = tally.tokens
        now = clock().monotonic
        self._windows = {
            key: deque(now - age for age in sorted(ages, reverse=True)) for key, ages in tally.ages_s.items()
        }
        self._open: Counter[str] = Counter()
        self._parallel: Counter[tuple[str, str]] = Counter()

    @property
    def open_calls(self) -> int:
        return self._open.total()

    @contextmanager
    def reserve(self, call: str, account: Account, model: str, max_parallel: int | None) -> Generator[Reservation]:
        """Count one call, open until the block ends. Raises the first limit that refuses it.

        `max_parallel` is the model's own bound per member, which goes before the defaults' and after the member's.
        """
        now = self._now()
        self._check(account, model, max_parallel, now)
        began = self._day
        self._open[account.member] += 1
        self._parallel[account.member, model] += 1
        self._calls[account.key_id] += 1
        window = self._windows.setdefault(account.key_id, deque())
        self._recent(account.key_id, DAY_S, now)
        window.append(now.monotonic)
        self._journal.call_began(call, account, model, began)
        reservation, error = Reservation(), None
        try:
            yield reservation
        except BaseException as raised:
            error = raised
            raise
        finally:
            _drop(self._open, account.member)
            _drop(self._parallel, (account.member, model))
            settlement = _settle(reservation, error)
            if not settlement.keeps_window:
                window.remove(now.monotonic)
            self._now()
            if not settlement.keeps_call and began == self._day:
                _drop(self._calls, account.key_id)
            self._tokens[account.member] += settlement.prompt_tokens + settlement.completion_tokens
            self._journal.call_ended(call, account, model, began, self._day, settlement)

    def requests_left(self, account: Account) -> Remaining | None:
        """The tightest of the key's limits on calls; None where it has none."""
        now, key = self._now(), account.key_id
        found: list[Remaining] = []
        for length, limit in self._window_limits(account):
            entries = self._recent(key, length, now)
            reset = entries[-1] + length - now.monotonic if entries else 0.0
            found.append(Remaining(limit, max(0, limit - len(entries)), reset))
        daily = _first(account.limits.daily_calls, self.defaults.daily_calls)
        if daily is not None:
            found.append(Remaining(daily, max(0, daily - self._calls[key]), now.day_left_s))
        return min(found, key=lambda each: each.remaining, default=None)

    def tokens_left(self, account: Account) -> Remaining | None:
        now, limit = self._now(), _first(account.member_limits.daily_tokens, self.defaults.daily_tokens)
        if limit is None:
            return None
        return Remaining(limit, max(0, limit - self._tokens[account.member]), now.day_left_s)

    def _now(self) -> Now:
        """The time, with a new day begun if it is one."""
        now = self._clock()
        if now.day > self._day:
            self._day = now.day
            self._calls.clear()
            self._tokens.clear()
        return now

    def _check(self, account: Account, model: str, max_parallel: int | None, now: Now) -> None:
        member, defaults = account.member, self.defaults
        if self.open_calls >= defaults.open_calls:
            raise DeviceBusy(self.open_calls)
        own_open = account.member_limits.open_per_member or defaults.open_per_member
        if self._open[member] >= own_open:
            raise TooManyStreams(own_open)
        for length, limit in self._window_limits(account):
            entries = self._recent(account.key_id, length, now)
            if len(entries) >= limit:
                free_at = entries[-limit] + length
                raise RateLimited(_WINDOW_NAMES[length], limit, max(1, math.ceil(free_at - now.monotonic)))
        until_midnight = max(1, math.ceil(now.day_left_s))
        daily = _first(account.limits.daily_calls, defaults.daily_calls)
        if daily is not None and self._calls[account.key_id] >= daily:
            raise DailyLimit(daily, self._calls[account.key_id], until_midnight)
        tokens = _first(account.member_limits.daily_tokens, defaults.daily_tokens)
        if tokens is not None and self._tokens[member] >= tokens:
            raise DailyTokens(tokens, self._tokens[member], until_midnight)
        parallel = _first(account.member_limits.max_parallel, max_parallel, defaults.max_parallel)
        if parallel is not None and self._parallel[member, model] >= parallel:
            raise ParallelUnsupported(model) if parallel == 1 else TooManyParallel(model, parallel)

    def _window_limits(self, account: Account) -> list[tuple[float, int]]:
        own, defaults = account.limits, self.defaults
        limits = (
            (MINUTE_S, _first(own.calls_per_minute, defaults.calls_per_minute)),
            (DAY_S, _first(own.calls_per_day, defaults.calls_per_day)),
        )
        return [(length, limit) for length, limit in limits if limit is not None]

    def _recent(self, key: str, length: float, now: Now) -> Sequence[float]:
        """The times of the key's calls within `length` seconds, oldest first; those past a day are dropped."""
        window = self._windows.get(key, deque[float]())
        while window and window[0] <= now.monotonic - DAY_S:
            window.popleft()
        if length == DAY_S:
            return window
        recent = list(takewhile(lambda at: at > now.monotonic - length, reversed(window)))
        return recent[::-1]


_WINDOW_NAMES: Final = {MINUTE_S: "60 s", DAY_S: "24 h"}


def _settle(reservation: Reservation, error: BaseException | None) -> Settlement:
    """What a call that has ended counts for.

    A call that failed at the prompt counts for nothing. One that got no model, or got an error of the server's before
    its first token, is given back to the day, and so is one whose caller left while it waited for the model.
    """
    server_failed = isinstance(error, CitadelError) and error.row.status >= 500
    unanswered = error is not None and not reservation.answering
    # Of some engines the context length is known only once they are there.
    at_prompt = ContextLengthExceeded if reservation.prompt_ready else BadRequest
    prompt_failed = unanswered and isinstance(error, at_prompt)
    gives_back = unanswered and (server_failed or prompt_failed or not reservation.model_ready)
    return Settlement(
        keeps_call=not gives_back,
        keeps_window=not prompt_failed,
        prompt_tokens=reservation.prompt_tokens if reservation.answering else 0,
        completion_tokens=reservation.completion_tokens,
    )


def _first(*limits: int | None) -> int | None:
    return next((limit for limit in limits if limit is not None), None)


def _drop(counter: Counter[K], key: K) -> None:
    """One less of `key`; an entry at zero goes, or every member that ever called would be remembered."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
