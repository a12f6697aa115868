"""Which processes are an engine's, told with idle ones that are named as vLLM's are; no vLLM is needed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from engines.hyperqwen_process import Processes


@contextmanager
def engine_process() -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=signal.pause, name="EngineCore")
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_an_engine_that_is_closed_takes_none_with_it_that_was_started_later(tmp_path: Path):
    first = Processes(tmp_path / "first")
    with engine_process() as early:
        first.settle()
        second = Processes(tmp_path / "second")
        with engine_process() as late:
            second.settle()
            assert (first.pids, second.pids) == ((early.pid,), (late.pid,))
            first.clear()
            assert not early.is_alive()
            assert late.is_alive()
            second.clear()
            assert not late.is_alive()


def test_a_start_that_is_killed_takes_all_with_it_that_has_started(tmp_path: Path):
    processes = Processes(tmp_path / "log")
    with engine_process() as engine:
        processes.clear()
        assert not engine.is_alive()
