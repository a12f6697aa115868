"""The benchmark of the queue is deterministic, and by it our policy is dominated on none of its traces."""

from __future__ import annotations

import pytest

from benchmarks import sim_queue
from citadel.config import Gpu

OURS = sim_queue.ours(Gpu().min_residency_s, Gpu().max_wait_s)


def test_the_same_seed_gives_the_same_figures() -> None:
    trace = sim_queue.TRACES["steady mix"]
    assert sim_queue.replay(trace, OURS, 1) == sim_queue.replay(trace, OURS, 1)


@pytest.mark.parametrize("trace", sim_queue.TRACES)
def test_ours_is_on_the_pareto_front(trace: str) -> None:
    policies = {"ours": OURS, **sim_queue.PLAIN}
    outcomes = {
        name: sim_queue.mean_of([sim_queue.replay(sim_queue.TRACES[trace], policy, seed) for seed in range(3)])
        for name, policy in policies.items()
    }
    assert sim_queue.on_front(outcomes, "ours"), outcomes


def test_an_outcome_beats_another_when_it_is_better_in_something_and_worse_in_nothing() -> None:
    outcome = sim_queue.Outcome(swaps=2, mean_s=3, p95_s=4, fairness=0.5, longest_s=9)
    fairer = sim_queue.Outcome(swaps=2, mean_s=3, p95_s=4, fairness=0.6, longest_s=99)
    slower = sim_queue.Outcome(swaps=2, mean_s=4, p95_s=4, fairness=0.6, longest_s=9)
    assert fairer.beats(outcome)
    assert not outcome.beats(fairer)
    assert not outcome.beats(outcome)
    assert not outcome.beats(slower)
    assert not slower.beats(outcome)


def test_jains_index_is_one_when_all_wait_alike_and_a_share_when_one_waits() -> None:
    assert sim_queue.jain([3, 3, 3]) == pytest.approx(1.0)
    assert sim_queue.jain([3, 0, 0]) == pytest.approx(1 / 3)
    assert sim_queue.jain([0, 0]) == 1.0
