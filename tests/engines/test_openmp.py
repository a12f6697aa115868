"""How long the threads that compute spin: when it changes, and that libgomp follows."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from typing import Any

import pytest

from engines.openmp import CALM_S, ENOUGH, FIRST_S, MOST_S, NEVER_LONG, Spin, Watch, brief, looked

LITTLE = ENOUGH - 0.01


def test_threads_that_get_their_time_go_on_spinning():
    assert looked(Spin(), ENOUGH, 100) == Spin()
    assert looked(Spin(), 1.02, 200) == Spin(), "other threads of the process have some, too"


def test_the_first_look_that_finds_others_ends_it_for_a_while():
    spin = looked(Spin(), LITTLE, 100)
    assert spin == Spin(long=False, since=100, pause_s=FIRST_S)
    assert looked(spin, 1.0, 100 + FIRST_S / 2) == spin
    assert looked(spin, LITTLE, 100 + FIRST_S).long, "how much threads get that sleep says nothing"


def test_each_trial_that_fails_is_followed_by_a_longer_pause():
    spin, now, pauses = looked(Spin(), LITTLE, 100), 100.0, list[float]()
    for _ in range(6):
        pauses.append(spin.pause_s)
        spin = looked(spin, LITTLE, now := now + spin.pause_s)
        spin = looked(spin, LITTLE, now := now + 0.1)
    assert pauses == [1, 2, 4, 8, MOST_S, MOST_S]


def test_after_a_calm_time_the_first_pause_is_short_again():
    spin = Spin(long=True, since=100, pause_s=MOST_S)
    assert looked(spin, LITTLE, 100 + CALM_S / 2).pause_s == MOST_S
    assert looked(spin, LITTLE, 100 + CALM_S).pause_s == FIRST_S


def test_where_the_gpu_computes_it_is_never_tried():
    assert looked(NEVER_LONG, 1.0, 1e9) is NEVER_LONG


class Told:
    """In place of libgomp: the idle threads that it keeps."""

    def __init__(self) -> None:
        self.idle: list[int] = []

    def GOMP_parallel(self, _function: object, _data: object, threads: int, _flags: int) -> None:  # noqa: N802
        self.idle.append(threads)

    def omp_pause_resource_all(self, _kind: int) -> None:
        self.idle.append(0)


def test_idle_threads_are_as_many_as_make_one_more_than_cores():
    told = Told()
    watch = Watch(told, 8, Spin())
    watch.keep()
    watch.take(8)
    watch.look(LITTLE)
    watch.take(6)
    watch.take(-6)
    watch.take(-8)
    watch.look(1.0)
    # Each team has one that is not libgomp's: 8 + 2 - 1 is one more than the cores, 4 + 3 + 7 - 2 is more than that.
    assert told.idle == [2, 0, 2, 7, 2]


def test_models_that_share_the_cores_are_counted_with_what_they_have():
    told = Told()
    watch = Watch(told, 8, NEVER_LONG)
    for order in (8, 8):
        watch.take(order)
    assert [watch.share(8), told.idle[-1]] == [4, 6], "4 and 4 and 6, less one of each, are more than the cores"


def test_models_that_compute_at_the_same_time_share_the_cores():
    watch = Watch(Told(), 8, Spin())
    shares: list[tuple[int, ...]] = []
    for order in (8, 8, 2, 2, -8, -8):
        watch.take(order)
        shares.append((watch.share(8), watch.share(2), watch.share(1)))
    assert shares == [(8, 2, 1), (4, 1, 1), (3, 1, 1), (3, 1, 1), (5, 1, 1), (8, 2, 1)]


def test_a_model_that_computes_alone_has_the_threads_that_its_owner_gave_it():
    watch = Watch(Told(), 2, Spin())
    watch.take(4)
    assert watch.share(4) == 4


def test_a_model_that_is_asked_again_at_once_finds_it_as_it_was():
    told = Told()
    watch = Watch(told, 2, Spin())
    watch.keep()
    for order in (2, -2, 2):
        watch.take(order)
    assert told.idle == [2, 0]


def test_what_is_not_switched_spins_briefly_unless_its_owner_has_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert brief() == {"GOMP_SPINCOUNT": "1000"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert brief() == {"GOMP_SPINCOUNT": "5"}
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert brief() == {}, "a count would undo the policy"


PROGRAM = """
import json, os, sys
os.environ["GOMP_SPINCOUNT"] = "1000"  # as the server does
before = dict(os.environ)
from engines import openmp
assert dict(os.environ) == before
if openmp.libgomp is None:
    sys.exit("not switched")
openmp.libgomp.omp_display_env(1)
openmp.ENOUGH = 0.0  # nothing computes here
threads = lambda: len(os.listdir("/proc/self/task"))
def until(wanted):
    while threads() != wanted:
        os.sched_yield()
base = threads()
watch = openmp.watch(openmp.libgomp, openmp.Spin())
until(base + 2)
watch.at_work(len(os.sched_getaffinity(0)))
until(base + 1)
watch.at_rest(len(os.sched_getaffinity(0)))
until(base + 2)
"""


def run(**environment: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.skipif(ctypes.util.find_library("gomp") is None, reason="GNU's OpenMP is not there")
def test_libgomp_is_given_both_counts_and_its_idle_threads_come_and_go():
    ran = run()
    assert ran.returncode == 0, ran.stderr
    assert "GOMP_SPINCOUNT = '300000'" in ran.stderr
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in ran.stderr


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_who_sets_how_threads_wait_has_decided(name: str):
    assert run(**{name: "5000" if name == "GOMP_SPINCOUNT" else "passive"}).stderr.strip() == "not switched"
