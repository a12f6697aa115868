"""When the registry's worker looks again by itself."""

from __future__ import annotations

import time

import pytest

from citadel.engine import Need
from citadel.runtime.gpu_queue import Resident
from citadel.runtime.waiting import pause


def idle(expires_at: float | None) -> Resident:
    return Resident(
        "m",
        Need(),
        busy=False,
        draining=False,
        dismissed=False,
        pinned=False,
        since=0,
        last_used=0,
        expires_at=expires_at,
    )


def test_it_looks_again_at_the_first_time_to_come() -> None:
    now = time.monotonic()
    assert pause([], [idle(now + 50)], [now + 20, None], 900, now) == pytest.approx(20, abs=5)


def test_what_was_due_when_it_looked_last_is_not_looked_at_again() -> None:
    now = time.monotonic()
    assert pause([], [idle(now - 1)], [now - 2], 900, now) is None


def test_what_came_due_since_it_looked_is_looked_at_at_once() -> None:
    now = time.monotonic()
    assert pause([], [idle(now - 1)], [], 900, now - 2) == 0


def test_it_waits_for_an_event_when_nothing_is_due() -> None:
    assert pause([], [idle(None)], [], 900, time.monotonic()) is None
