"""Prompts that were computed and whose place others needed: what they are and, in RAM, llama.cpp's copy of them.

The planner decides by the tokens. The bytes are put here by the thread that does what was planned, and only then is
known how many they are; so an entry may be gone by the time that it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray


def common(left: array[int], right: array[int]) -> int:
    """How many tokens two sequences begin with in common."""
    size = min(len(left), len(right))
    if size == 0:
        return 0
    differ = np.frombuffer(left, np.int32, size) != np.frombuffer(right, np.int32, size)
    first = int(differ.argmax())
    return first if differ[first] else size


@dataclass(slots=True, eq=False)
class Saved:
    """`data` is None until it is copied."""

    tokens: array[int]
    data: NDArray[np.uint8] | None = None


class Archive:
    """Never holds more than `capacity` bytes of copies; the one longest unused goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._saved: list[Saved] = []
        """Longest unused first."""

    def __len__(self) -> int:
        return len(self._saved)

    def holds(self, tokens: array[int]) -> bool:
        return any(common(saved.tokens, tokens) == len(tokens) for saved in self._saved)

    def promise(self, tokens: array[int]) -> Saved:
        """An entry whose bytes `fill` will bring. It replaces those that are its own beginning."""
        for other in [each for each in self._saved if common(each.tokens, tokens) == len(each.tokens)]:
            self.drop(other)
        saved = Saved(tokens[:])
        self._saved.append(saved)
        return saved

    def fill(self, saved: Saved, data: NDArray[np.uint8]) -> None:
        if data.nbytes > self.capacity:
            self.drop(saved)
        if saved not in self._saved:
            return
        filled = (each for each in list(self._saved) if each.data is not None)
        while self.size + data.nbytes > self.capacity:
            self.drop(next(filled))
        saved.data = data
        self.size += data.nbytes

    def drop(self, saved: Saved) -> None:
        if saved in self._saved:
            self._saved.remove(saved)
            self.size -= saved.data.nbytes if saved.data is not None else 0
        saved.data = None

    def longest(self, tokens: array[int], most: int, *, whole: bool) -> tuple[Saved | None, int]:
        """The entry with the longest common beginning, `most` tokens of it at most; `whole`: all of the entry."""
        best: tuple[Saved | None, int] = (None, 0)
        for saved in self._saved:
            length = min(common(saved.tokens, tokens), most)
            if length > best[1] and not (whole and length < len(saved.tokens)):
                best = (saved, length)
        return best

    def use(self, saved: Saved) -> None:
        """It was asked for just now."""
        self._saved.remove(saved)
        self._saved.append(saved)
