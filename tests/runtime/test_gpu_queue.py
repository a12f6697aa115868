"""What the queue decides: fits, evicts idle before busy, drains and never cuts off, refuses with both numbers."""

from __future__ import annotations

from typing import Any

from citadel.engine import Need
from citadel.runtime.gpu_queue import Admit, Drain, Load, Refuse, Resident, Unload, View, Wanted, decide

GB = 10**9


def wanted(model: str, ram: int | None = 1) -> Wanted:
    return Wanted(model, None if ram is None else Need(ram=ram * GB))


def resident(model: str, **fields: Any) -> Resident:
    defaults = {
        "busy": False,
        "draining": False,
        "dismissed": False,
        "pinned": False,
        "last_used": 0.0,
        "expires_at": None,
    }
    return Resident(model, Need(ram=GB), **{**defaults, **fields})


def view(*queue: Wanted, residents: tuple[Resident, ...] = (), free: int = 0, working: bool = False) -> View:
    return View(queue, residents, Need(ram=free * GB), working, now=100.0)


def test_what_fits_is_loaded() -> None:
    assert decide(view(wanted("a"), free=1)) == [Load("a")]


def test_the_first_of_the_queue_goes_first() -> None:
    assert decide(view(wanted("a"), wanted("b"), free=1)) == [Load("a")]


def test_nothing_begins_while_something_is_under_way() -> None:
    assert decide(view(wanted("a"), free=1, working=True)) == []


def test_a_wanted_model_that_is_loaded_is_admitted_even_then() -> None:
    assert decide(view(wanted("a"), residents=(resident("a"),), working=True)) == [Admit("a")]


def test_a_model_whose_need_is_not_known_yet_holds_up_nobody() -> None:
    assert decide(view(wanted("a", None), wanted("b"), free=1)) == [Load("b")]


def test_the_least_recently_used_idle_model_makes_room() -> None:
    residents = (resident("new", last_used=2), resident("old", last_used=1))
    assert decide(view(wanted("a"), residents=residents)) == [Unload("old")]


def test_a_pinned_model_stays() -> None:
    residents = (resident("pinned", pinned=True, last_used=1), resident("other", last_used=2))
    assert decide(view(wanted("a"), residents=residents)) == [Unload("other")]


def test_a_busy_model_is_drained_and_not_unloaded() -> None:
    assert decide(view(wanted("a"), residents=(resident("b", busy=True),))) == [Drain("b", on=True)]
    assert decide(view(wanted("a"), residents=(resident("b", busy=True, draining=True),))) == []
    assert decide(view(wanted("a"), residents=(resident("b", draining=True),))) == [Drain("b", on=False), Unload("b")]


def test_an_idle_model_is_kept_until_the_busy_one_has_drained() -> None:
    residents = (resident("idle"), resident("busy", busy=True, draining=True))
    assert decide(view(wanted("a", 2), residents=residents)) == []


def test_a_draining_model_takes_calls_again_when_nobody_waits_for_its_room() -> None:
    assert decide(view(residents=(resident("b", busy=True, draining=True),))) == [Drain("b", on=False)]


def test_a_draining_model_that_is_wanted_again_waits_its_turn() -> None:
    residents = (resident("b", busy=True, draining=True),)
    assert decide(view(wanted("a"), wanted("b"), residents=residents)) == []


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    residents = (resident("b", busy=True), resident("pinned", pinned=True))
    assert decide(view(wanted("a", 9), residents=residents, free=2)) == [Refuse("a", "RAM", 9 * GB, 3 * GB)]


def test_gpu_memory_counts_for_itself() -> None:
    need = Need(ram=0, gpu=5)
    decided = decide(View([Wanted("a", need)], (), Need(ram=10, gpu=4), working=False, now=0))
    assert decided == [Refuse("a", "GPU memory", 5, 4)]


def test_an_idle_model_past_its_time_to_live_is_unloaded() -> None:
    residents = (
        resident("a", expires_at=99.0),
        resident("b", expires_at=101.0),
        resident("c", busy=True, expires_at=1.0),
    )
    assert decide(view(residents=residents)) == [Unload("a")]


def test_a_dismissed_model_is_unloaded_once_idle_and_drains_until_then() -> None:
    assert decide(view(residents=(resident("a", dismissed=True),))) == [Unload("a")]
    assert decide(view(residents=(resident("a", dismissed=True, busy=True, draining=True),))) == []
    assert decide(view(residents=(resident("a", dismissed=True, busy=True),))) == [Drain("a", on=True)]
