"""How many cells of llama.cpp's memory are taken, where sequences have some in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Cells:
    """Counts memory cells that sequences may have in common."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._next = 0

    @property
    def used(self) -> int:
        return len(self._holders)

    def take(self, count: int) -> range:
        new = range(self._next, self._next + count)
        self._next += count
        self._holders.update(dict.fromkeys(new, 1))
        return new

    def share(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._holders[cell] += 1

    def release(self, cells: Iterable[int]) -> None:
        for cell in cells:
            if self._holders[cell] == 1:
                del self._holders[cell]
            else:
                self._holders[cell] -= 1
