"""How long the threads that compute spin at a barrier before they sleep: long while the cores are theirs, else briefly.

A token has hundreds of barriers. Where nothing else runs, a stream is faster by a tenth or more with threads that spin
some 3 ms, as libgomp has them by itself; with one foreign process on the cores they spin while the thread that all wait
for has no core, and a token takes up to fifty times as long.

libgomp has two counts; the shorter one is for a process that keeps more threads than there are cores. It reads them
when it is loaded. So it is loaded here, with both of them set, and idle threads that are kept or let go switch between
them. Spinning is brief but where a model computes and `Watch` sees its threads get all the time that they ask for.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

COUNT: Final = "GOMP_SPINCOUNT"
BRIEF: Final = "1000"
"""For an OpenMP that is not switched."""
_BOTH: Final = {COUNT: "300000", "OMP_WAIT_POLICY": "active"}
"""libgomp's own count, and the policy with which the shorter one is 1000, and not 100."""
_OWNERS: Final = ("GOMP_SPINCOUNT=", "OMP_WAIT_POLICY=", "OMP_DYNAMIC=", "OMP_THREAD_LIMIT=")
"""Who sets one of these has decided, or may have fewer idle threads than are needed."""
PAUSE_SOFT: Final = 1

LOOK_S: Final = 0.1
ENOUGH: Final = 0.85
"""Of the processor time that spinning threads ask for; with less, somebody else computes on their cores."""
FIRST_S, MOST_S = 1.0, 16.0
"""Brief spinning lasts for so long, twice as long after each trial that failed, before the next trial."""
CALM_S: Final = 5.0
"""Long spinning that held for this long was no mistake."""


@dataclass(frozen=True, slots=True)
class Spin:
    """`since` is when it became so; `pause_s` for how long brief spinning lasts, or lasted the last time."""

    long: bool = True
    since: float = 0.0
    pause_s: float = FIRST_S


NEVER_LONG: Final = Spin(long=False, pause_s=float("inf"))


def looked(spin: Spin, got: float, now: float) -> Spin:
    """`got`: the share that the threads had since the last look, of the time that they ask for when all spin."""
    if not spin.long:
        return Spin(True, now, spin.pause_s) if now - spin.since >= spin.pause_s else spin
    if got >= ENOUGH:
        return spin
    return Spin(False, now, FIRST_S if now - spin.since >= CALM_S else min(2 * spin.pause_s, MOST_S))


class Watch(threading.Thread):
    """Looks at the models that compute, and keeps the idle threads. It lives as long as the process.

    It is a thread of its own since a step may last for seconds where its threads spin and have no core.
    """

    def __init__(self, libgomp: Any, cores: int, spin: Spin) -> None:
        super().__init__(name="openmp", daemon=True)
        self._libgomp = libgomp
        self._cores = cores
        self._spin = spin
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._working: list[int] = []
        self._asked = 0
        self._kept = 0
        self._wall = self._cpu = 0.0

    def at_work(self, threads: int) -> None:
        """A model computes from now on, with so many threads. May be called from any thread."""
        self._orders.put(threads)

    def at_rest(self, threads: int) -> None:
        """It computes no more for now."""
        self._orders.put(-threads)

    def share(self, threads: int) -> int:
        """With how many of its threads a model is to compute, so that several that do have no more than cores.

        With more, none of them spins for long, and each wakes up to find the cores taken.
        """
        asked = self._asked
        if asked <= self._cores or len(self._working) < 2:
            return threads
        return max(1, threads * self._cores // asked)

    def run(self) -> None:
        self.keep()
        while True:
            settled = not self._working and self._kept
            try:
                order = self._orders.get(timeout=None if settled else LOOK_S)
            except queue.Empty:
                self.look(self._got())
            else:
                self.take(order)

    def take(self, order: int) -> None:
        if order > 0:
            self._working.append(order)
        else:
            self._working.remove(-order)
        self._asked = sum(self._working)
        self._got()  # from here on
        if self._working:
            self.look(1.0)  # else not at once: a model that rests may soon be asked again

    def look(self, got: float) -> None:
        if self._working:
            self._spin = looked(self._spin, got, time.monotonic())
        if self._working and self._spin.long:
            self._let_go()
        else:
            self.keep()

    def keep(self) -> None:
        """An idle team, with which there is one thread more than cores."""
        threads = max(2, self._cores + 2 - min(map(self.share, self._working), default=self._cores))
        if threads != self._kept:
            self._kept = threads
            self._libgomp.GOMP_parallel(_NOTHING, None, threads, 0)

    def _let_go(self) -> None:
        if self._kept:
            self._kept = 0
            self._libgomp.omp_pause_resource_all(PAUSE_SOFT)

    def _got(self) -> float:
        """As `looked` takes it."""
        before, self._wall, self._cpu = (self._wall, self._cpu), time.monotonic(), time.process_time()
        asked = (self._wall - before[0]) * min(self._asked, self._cores)
        return (self._cpu - before[1]) / asked if asked else 1.0


_NOTHING: Final = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
"""What an idle team has done: free(NULL)."""


def brief() -> Mapping[str, str]:
    """For what computes with an OpenMP that is not switched; nothing where its owner has decided."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {COUNT: os.environ.get(COUNT, BRIEF)}


@contextmanager
def environment(wanted: Mapping[str, str]) -> Generator[None]:
    """What is loaded within finds `wanted` in the environment; what is started later does not."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _load() -> Any:
    """libgomp with both counts; None where its owner has decided, where there is none, or it was loaded before."""
    try:
        # As the process was started: later the server sets one of them, for the processes of its engines.
        first = Path("/proc/self/environ").read_text(encoding="utf-8", errors="replace")
        if any(entry.startswith(_OWNERS) for entry in first.split("\0")):
            return None
        with suppress(OSError):
            ctypes.CDLL("libgomp.so.1", os.RTLD_NOLOAD)
            return None
        with environment(_BOTH):
            return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


libgomp: Final = _load()
_cores: Final = len(os.sched_getaffinity(0))


def is_gnus(linked: ctypes.CDLL) -> bool:
    """Whether `linked` does not lead to LLVM's or Intel's OpenMP, which may have libgomp's name."""
    return not hasattr(linked, "__kmpc_fork_call")


def watch(linked: ctypes.CDLL, spin: Spin) -> Watch | None:
    """None where the library `linked` does not compute with `libgomp`: then its threads spin as they do."""
    if libgomp is None or not is_gnus(linked) or _address(linked) != _address(libgomp):
        return None
    watching = Watch(libgomp, _cores, spin)
    watching.start()
    return watching


def _address(library: ctypes.CDLL) -> int | None:
    try:
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None
