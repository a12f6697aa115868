"""vLLM's processes as seen from ours: which they are, why they ended, and that none is left.

vLLM ends its processes with SIGKILL after a grace period, and leaves three things to others: its workers, where the
engine's process was killed before it could end them, and the named semaphores and the shared memory of the killed. All
are seen to here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import psutil

_ENGINE: Final = "EngineCore"
_MONITOR: Final = "MPClientEngineMonitor"
_GRACE_S: Final = 5.0
"""How long a process that was sent SIGKILL may take to be gone: its memory is given back meanwhile."""

_SEM_UNLINK: Final[Callable[[str], None]] = import_module("_multiprocessing").sem_unlink
"""The standard library has no public name for this."""

_LOG_TAIL: Final = 64 << 10
_RAISED: Final = re.compile(r"(?m)^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*)$")
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps semaphores and shared memory, no place of ours
_PYTHONS, _VLLMS = "psm_", "vllm_dist_"
"""How the names of shared memory begin that Python made, for vLLM's queues, and vLLM itself, between its workers."""


class Processes:
    """The processes and the watching thread of one engine. Made before the engine; `settle` when it has started.

    Loads take turns, so what is new between the two is this engine's; what is new later is another's.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._earlier = _engines().keys() | _monitors().keys()
        self._engines: dict[int, BaseProcess] = {}
        self._workers: dict[int, psutil.Process] = {}
        self._monitors: list[threading.Thread] = []
        self._semaphores: set[str] = set()
        self._memory: set[str] = set()
        self._settled = False

    def settle(self) -> None:
        """Take note of what has started, and of no engine after it."""
        self.find()
        self._settled = True

    def find(self) -> None:
        """Take note of all that there are by now: processes, their workers, what they hold."""
        if not self._settled:
            self._engines |= {pid: engine for pid, engine in _engines().items() if pid not in self._earlier}
            self._monitors = [thread for ident, thread in _monitors().items() if ident not in self._earlier]
        for pid in list(self._engines):
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in psutil.Process(pid).children(recursive=True):
                    self._workers.setdefault(worker.pid, worker)
        mapped = [mapping for pid in self.pids for mapping in _shared_by(pid)]
        self._semaphores |= _semaphores({inode for name, inode in mapped if name.startswith("sem.")})
        self._memory |= {name for name, _inode in mapped if name.startswith((_PYTHONS, _VLLMS))}

    @property
    def pids(self) -> tuple[int, ...]:
        return (*self._engines, *self._workers)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """File descriptors that become readable when an engine's process ends."""
        return tuple(engine.sentinel for engine in self._engines.values())

    def kill(self) -> None:
        """Send SIGKILL to all that there are by now."""
        self.find()
        for engine in list(self._engines.values()):
            engine.kill()
        for worker in list(self._workers.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def clear(self) -> None:
        """Kill what is left, wait until all are gone, and remove what they could not. Blocks."""
        self.kill()
        for engine in self._engines.values():
            engine.join(_GRACE_S)
        psutil.wait_procs(list(self._workers.values()), timeout=_GRACE_S)
        for monitor in self._monitors:
            monitor.join(_GRACE_S)
        for name in self._semaphores:
            with contextlib.suppress(FileNotFoundError):
                _SEM_UNLINK(name)
                resource_tracker.unregister(name, "semaphore")
        for name in self._memory:
            with contextlib.suppress(FileNotFoundError):
                (_SHARED / name).unlink()
                if name.startswith(_PYTHONS):
                    resource_tracker.unregister(f"/{name}", "shared_memory")

    def obituary(self) -> str:
        """Why the engine ended: the signal that ended it, else the last error it logged. Blocks."""
        for monitor in self._monitors:
            monitor.join(_GRACE_S)  # it takes the exit code; asked at the same moment, the system tells only one
        for engine in self._engines.values():
            engine.join(_GRACE_S)
            if engine.exitcode is not None and engine.exitcode < 0:
                return f"its process was ended by {signal.Signals(-engine.exitcode).name}"
        return self.last_error() or "its process ended"

    def last_error(self) -> str | None:
        """The last line of the last traceback in the engine's own log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _LOG_TAIL))
                raised = _RAISED.findall(file.read().decode("utf-8", "replace"))
        except OSError:
            return None
        return raised[-1] if raised else None


def _engines() -> dict[int, BaseProcess]:
    children = multiprocessing.active_children()
    return {child.pid: child for child in children if child.pid is not None and child.name.startswith(_ENGINE)}


def _monitors() -> dict[int, threading.Thread]:
    threads = threading.enumerate()
    return {thread.ident: thread for thread in threads if thread.ident is not None and thread.name == _MONITOR}


def _shared_by(pid: int) -> list[tuple[str, int]]:
    """Names and inodes of what the process has mapped of the shared memory; none of one that has ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    lines = (line.split(maxsplit=5) for line in maps.splitlines() if f" {_SHARED}/" in line)
    return [(parts[5].removeprefix(f"{_SHARED}/").removesuffix(" (deleted)"), int(parts[4])) for parts in lines]


def _semaphores(inodes: set[int]) -> set[str]:
    """Names of the semaphores. Each is made in a file of one name that is then linked to its own, and the mapping
    still shows the first: what the two have in common is the inode."""
    files = _SHARED.glob("sem.mp-*") if inodes else ()
    return {f"/{file.name.removeprefix('sem.')}" for file in files if file.stat().st_ino in inodes}
