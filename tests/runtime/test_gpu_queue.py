"""What the queue decides: fits, evicts idle before busy, drains and never cuts off, refuses with both numbers."""

from __future__ import annotations

from typing import Any

import pytest

from citadel.engine import Need
from citadel.runtime.gpu_queue import (
    Admit,
    Drain,
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

GB = 10**9


def wanted(model: str, ram: int | None = 1) -> Wanted:
    return Wanted(model, None if ram is None else Need(ram=ram * GB))


def resident(model: str, **fields: Any) -> Resident:
    flags = dict.fromkeys(("busy", "draining", "dismissed", "pinned"), False)
    times = {"since": 0.0, "last_used": 0.0, "expires_at": None}
    return Resident(model, Need(ram=GB), **{**flags, **times, **fields})


def view(*queue: Wanted | Job, residents: tuple[Resident, ...] = (), free: int = 0, **fields: Any) -> View:
    defaults: dict[str, Any] = {"running": (), "has_gpu": False, "working": False, "now": 100.0}
    return View(queue, residents, free=Need(ram=free * GB), **{**defaults, **fields})


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
    shared: dict[str, Any] = {"running": (), "has_gpu": True, "working": False, "now": 0.0}
    decided = decide(View([Wanted("a", need)], (), free=Need(ram=10, gpu=4), **shared))
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


WHOLE = Job("whole", None)


def small(memory: int = 1) -> Job:
    return Job("small", memory * GB)


def test_a_job_that_wants_the_whole_gpu_waits_out_the_models() -> None:
    residents = (resident("idle"), resident("busy", busy=True), resident("pinned", pinned=True))
    assert decide(view(WHOLE, residents=residents)) == [Drain("busy", on=True)]
    assert decide(view(WHOLE, residents=residents[:1])) == [Unload("idle")]
    assert decide(view(WHOLE, residents=residents[2:])) == [Grant("whole", GB)]


def test_with_a_gpu_models_in_ram_are_not_in_its_way() -> None:
    assert decide(view(WHOLE, residents=(resident("in ram"),), has_gpu=True)) == [Grant("whole", 0)]


def test_everybody_waits_for_a_job_that_has_the_whole_gpu() -> None:
    assert decide(view(wanted("a"), free=9, running=(WHOLE,))) == []
    assert decide(view(small(), free=9, running=(WHOLE,))) == []
    assert decide(view(WHOLE, free=9, running=(small(),))) == []


def test_a_job_that_states_its_memory_runs_beside_the_models() -> None:
    assert decide(view(small(), residents=(resident("a", busy=True),), free=1)) == [Grant("small", 2 * GB)]


def test_such_a_job_passes_only_those_whom_it_does_not_delay() -> None:
    waiting = wanted("a", 3)
    busy = (resident("b", busy=True, draining=True),)
    assert decide(view(waiting, small(), residents=busy, free=2)) == []
    assert decide(view(waiting, small(), residents=busy, free=3)) == [Drain("b", on=False), Load("a")]
    assert decide(view(waiting, small(), residents=busy, free=4)) == [Grant("small", 5 * GB)]
    assert decide(view(WHOLE, small(), residents=busy, free=9)) == []


def test_what_a_running_job_stated_is_not_free() -> None:
    assert decide(view(wanted("a", 2), free=2, running=(small(),))) == [LookAgain(105.0)]
    assert decide(view(wanted("a", 1), free=2, running=(small(),))) == [Load("a")]


@pytest.mark.parametrize(
    ("free", "jobs", "left"),
    [
        (9, [(3, 9)], 6),  # it has taken nothing yet
        (7, [(3, 9)], 6),  # part of it
        (6, [(3, 9)], 6),  # all of it
        (4, [(3, 9)], 4),  # more than it stated
        (10, [(3, 9)], 7),  # something else gave memory back
        (6, [(3, 9), (2, 6)], 4),  # the first has its memory, the second not yet
        (4, [(3, 9), (2, 6)], 4),  # both have
        (7, [(3, 9), (2, 9)], 4),  # one of them has some, whichever it is
        (4, [(3, 9), (2, 4)], 2),  # the first took more, and none of it from the second
        (9, [(3, None)], 6),  # what was there when it was granted is not known
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_what_a_running_job_has_taken_of_what_it_stated_counts_once(
    free: int, jobs: list[tuple[int, int | None]], left: int, has_gpu: bool
) -> None:
    def of(amount: int) -> Need:
        return Need(gpu=amount * GB) if has_gpu else Need(ram=amount * GB)

    running = [Job("runs", stated * GB, spare=None if spare is None else spare * GB) for stated, spare in jobs]
    shared: dict[str, Any] = {"running": running, "has_gpu": has_gpu, "working": False, "now": 100.0}
    assert decide(View([Wanted("a", of(left))], (), free=of(free), **shared)) == [Load("a")]
    assert decide(View([Wanted("a", of(left + 1))], (), free=of(free), **shared)) == [LookAgain(105.0)]


def test_memory_that_models_give_or_take_is_not_the_jobs() -> None:
    """Granted beside a model of 1 GB with 4 GB free, of which it took none; a stuck engine still has its memory."""
    job = Job("runs", 2 * GB, spare=5 * GB)
    assert decide(view(wanted("a", 3), free=5, running=(job,))) == [Load("a")]
    assert decide(view(wanted("a", 2), free=4, running=(job,), stuck=(Need(ram=GB),))) == [Load("a")]
    assert decide(view(wanted("a", 3), free=4, running=(job,), stuck=(Need(ram=GB),))) == [LookAgain(105.0)]


def test_a_job_that_states_more_than_is_free_gets_room_made() -> None:
    assert decide(view(small(2), residents=(resident("a"),), free=1)) == [Unload("a")]
    assert decide(view(small(9), residents=(resident("a"),), free=1)) == [Unload("a")]
    assert decide(view(small(9), free=1)) == [Grant("small", GB)]


def test_a_busy_model_takes_calls_for_its_minimum_residency_unless_somebody_waited_the_maximum() -> None:
    young = (resident("b", busy=True, since=95.0),)
    times: dict[str, Any] = {"min_residency_s": 10.0, "max_wait_s": 60.0}
    asked = Wanted("a", Need(ram=GB), since=99.0)
    assert decide(view(asked, residents=young, **times)) == [LookAgain(105.0)]
    assert decide(view(asked, residents=(resident("b", busy=True, since=89.0),), **times)) == [Drain("b", on=True)]
    long_ago = Wanted("a", Need(ram=GB), since=30.0)
    assert decide(view(long_ago, residents=young, **times)) == [Drain("b", on=True)]


def test_an_idle_model_goes_at_once_however_young() -> None:
    times: dict[str, Any] = {"min_residency_s": 10.0, "max_wait_s": 60.0}
    asked = Wanted("a", Need(ram=GB), since=99.0)
    assert decide(view(asked, residents=(resident("b", since=95.0),), **times)) == [Unload("b")]


def test_a_model_whose_calls_are_let_in_is_not_unloaded_as_idle() -> None:
    """An idle model that took no calls for a moment, and now takes those that stand before the next load."""
    decided = decide(view(wanted("a"), wanted("b"), residents=(resident("a"),)))
    assert decided == [Admit("a"), Drain("a", on=True)]


def test_the_first_of_the_queue_is_served_also_when_it_is_a_model_that_drains() -> None:
    """It drained for somebody who left: unloading it for the next one would mean loading it twice."""
    residents = (resident("a", draining=True),)
    assert decide(view(wanted("a"), wanted("b"), residents=residents)) == [Drain("a", on=False)]


def test_a_model_that_has_drained_takes_no_calls_while_another_one_drains_for_the_same_load() -> None:
    """Else the two would take turns in being busy, and the load would never begin."""
    residents = (resident("drained", draining=True), resident("busy", busy=True, draining=True))
    assert decide(view(wanted("a", 2), wanted("drained"), residents=residents)) == []


def test_a_drain_is_not_passed_on_to_another_busy_model() -> None:
    """The one that drains may have been used last: its calls end."""
    residents = (
        resident("drains", busy=True, draining=True, last_used=2),
        resident("other", busy=True, last_used=1),
    )
    assert decide(view(wanted("a"), residents=residents)) == []


def test_a_model_that_gives_none_of_what_is_short_is_left_alone() -> None:
    in_ram = Resident("in ram", Need(ram=5), *[False] * 4, since=0.0, last_used=1.0, expires_at=None)
    on_gpu = Resident("on gpu", Need(ram=1, gpu=5), *[False] * 4, since=0.0, last_used=2.0, expires_at=None)
    shared: dict[str, Any] = {"running": (), "has_gpu": True, "working": False, "now": 0.0}
    decided = decide(View([Wanted("a", Need(gpu=5))], (in_ram, on_gpu), free=Need(ram=9, gpu=1), **shared))
    assert decided == [Unload("on gpu")]


def test_a_job_that_states_more_than_is_there_waits_for_those_that_run() -> None:
    assert decide(view(small(9), free=5, running=(Job("runs", GB),))) == []


def test_a_job_passes_only_what_all_fits_beside_it_together() -> None:
    assert decide(view(wanted("a", 3), wanted("b", 3), small(), free=6)) == [Load("a")]
    assert decide(view(wanted("a", 3), wanted("b", 3), small(), free=7)) == [Grant("small", 7 * GB)]


def test_nobody_drains_for_a_load_that_waits_for_a_media_job() -> None:
    residents = (resident("b", busy=True, draining=True, pinned=True),)
    decided = decide(view(wanted("a", 3), free=3, residents=residents, running=(small(),)))
    assert decided == [Drain("b", on=False), LookAgain(105.0)]


# Swapping in place.


def like(model: str) -> Wanted:
    return Wanted(model, Need(ram=GB), swap_key="family")


def test_an_idle_engine_that_the_first_can_take_over_is_swapped() -> None:
    assert decide(view(like("a"), residents=(resident("b", swap_key="family"),))) == [Swap("a", "b")]


def test_another_familys_engine_is_unloaded() -> None:
    assert decide(view(like("a"), residents=(resident("b", swap_key="other"),))) == [Unload("b")]


def test_models_without_a_family_have_none_in_common() -> None:
    assert decide(view(wanted("a"), residents=(resident("b"),))) == [Unload("b")]


def test_of_the_idle_ones_the_one_to_be_swapped_goes_first_though_it_was_used_last() -> None:
    residents = (resident("old", last_used=1), resident("kin", last_used=2, swap_key="family"))
    assert decide(view(like("a"), residents=residents)) == [Swap("a", "kin")]


def test_a_busy_one_is_drained_before_it_is_swapped() -> None:
    busy = resident("b", busy=True, swap_key="family")
    assert decide(view(like("a"), residents=(busy,))) == [Drain("b", on=True)]
    drained = resident("b", draining=True, swap_key="family")
    assert decide(view(like("a"), residents=(drained,))) == [Drain("b", on=False), Swap("a", "b")]


def test_an_idle_stranger_makes_room_before_a_busy_relative_is_drained() -> None:
    residents = (resident("kin", busy=True, swap_key="family"), resident("stranger"))
    assert decide(view(like("a"), residents=residents)) == [Unload("stranger")]


def test_a_pinned_engine_is_not_swapped() -> None:
    residents = (resident("kin", pinned=True, swap_key="family"), resident("other"))
    assert decide(view(like("a"), residents=residents)) == [Unload("other")]


def test_where_more_has_to_go_the_one_to_be_swapped_goes_last() -> None:
    """A relative that takes less than the wanted model is no case of today's engines, and must not go wrong either."""
    large = Wanted("a", Need(ram=2 * GB), swap_key="family")
    residents = (resident("kin", last_used=1, swap_key="family"), resident("stranger", last_used=2))
    assert decide(view(large, residents=residents)) == [Unload("stranger")]
    assert decide(view(large, residents=residents[:1], free=1)) == [Swap("a", "kin")]


def test_a_relative_that_may_stay_is_not_swapped() -> None:
    assert decide(view(like("a"), residents=(resident("b", swap_key="family"),), free=1)) == [Load("a")]


# The next model starts while the one before it ends.


def test_what_fits_beside_a_busy_model_is_loaded_while_that_answers() -> None:
    assert decide(view(wanted("a"), residents=(resident("b", busy=True),), free=1)) == [Load("a")]


def test_what_fits_beside_a_dismissed_model_is_loaded_while_that_drains() -> None:
    leaving = resident("b", busy=True, draining=True, dismissed=True)
    assert decide(view(wanted("a"), residents=(leaving,), free=1)) == [Load("a")]


def test_what_comes_to_fit_while_another_drains_for_it_is_loaded_at_once() -> None:
    """A media job has ended meanwhile: nobody needs to make room any more, and the drained one takes calls again."""
    draining = resident("b", busy=True, draining=True)
    assert decide(view(wanted("a"), residents=(draining,))) == []
    assert decide(view(wanted("a"), residents=(draining,), free=1)) == [Drain("b", on=False), Load("a")]
