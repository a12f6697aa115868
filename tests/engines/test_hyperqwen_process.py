"""Which processes are an engine's, told with idle ones that are named as vLLM's are; no vLLM is needed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
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


def hold_memory(told: Connection) -> None:
    memory = SharedMemory(create=True, size=64)
    told.send(memory.name)
    signal.pause()


def test_shared_memory_of_the_killed_is_removed_with_them_and_no_other(tmp_path: Path):
    ours = SharedMemory(create=True, size=64)
    processes = Processes(tmp_path / "log")
    hears, told = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(target=hold_memory, args=(told,), name="EngineCore")
    engine.start()
    try:
        name = hears.recv()
        assert Path("/dev/shm", name).exists()
        processes.settle()
        processes.clear()
        assert not Path("/dev/shm", name).exists()
        assert Path("/dev/shm", ours.name).exists()
    finally:
        engine.kill()
        engine.join()
        ours.close()
        ours.unlink()
