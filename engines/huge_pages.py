"""Memory that weights are read into: in huge pages, all of it there before it is read into.

A token reads gigabytes once. In pages of 4 KB the processor looks one up for each that it reads, which can take longer
than the reading. And a page that is given out when it is first written to is one thread's work; all of them do it here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

LEAST: Final = 32 << 20
"""Bytes. From there on glibc makes a mapping for it alone, and what was advised of that is gone when it is freed."""
_ADVISE_HUGE: Final = 14
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""
_PIECE: Final = 64 << 20
_MOST_THREADS: Final = 8


def prepare(address: int, size: int) -> None:
    """Memory that was allocated and not used yet. A system that can't do it gives pages out as it always does."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < LEAST:
        return
    _advise(first, last - first, _ADVISE_HUGE)
    # Where there are no more threads to be had, pages are given out as always.
    with suppress(RuntimeError), ThreadPoolExecutor(_threads()) as helpers:
        for piece in range(first, last, _PIECE):
            helpers.submit(_advise, piece, min(_PIECE, last - piece), _POPULATE)


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def _advise(address: int, size: int, advice: int) -> bool:
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) == 0
