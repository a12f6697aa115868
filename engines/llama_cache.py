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
    from collections.abc import Callable, Iterable

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
class Checkpoint:
    """What of a sequence can't be cut back, as it was at `length` tokens. `data` is None until it is copied."""

    length: int
    data: NDArray[np.uint8] | None = None


@dataclass(slots=True, eq=False)
class Saved:
    """All of a sequence. `data` is None until it is copied; `checkpoints` are those that it had.

    `floor` is what it will have when it is brought back.
    """

    tokens: array[int]
    data: NDArray[np.uint8] | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    floor: int = 0


class Archive:
    """Never holds more than `capacity` bytes of copies; the one longest unused goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._copies: list[Saved | Checkpoint] = []
        """Longest unused first."""

    def __len__(self) -> int:
        return len(self._copies)

    def holds(self, tokens: array[int]) -> bool:
        return any(common(saved.tokens, tokens) == len(tokens) for saved in self.saved())

    def promise(self, tokens: array[int], checkpoints: Iterable[Checkpoint] = (), floor: int = 0) -> Saved:
        """An entry whose bytes `fill` will bring. It replaces those that are its own beginning."""
        for other in [each for each in self.saved() if common(each.tokens, tokens) == len(each.tokens)]:
            self.drop(other)
        saved = Saved(tokens[:], None, tuple(checkpoints), floor)
        self._copies.append(saved)
        return saved

    def promise_checkpoint(self, checkpoint: Checkpoint) -> None:
        """As `promise`; it stays while a sequence or a saved one has it, and `sweep` takes it away."""
        self._copies.append(checkpoint)

    def sweep(self, held: Iterable[Checkpoint]) -> None:
        """Drops the checkpoints that are not `held` by a sequence, nor by a saved one."""
        kept = {id(each) for each in held}.union(id(each) for saved in self.saved() for each in saved.checkpoints)
        for each in [each for each in self._copies if isinstance(each, Checkpoint) and id(each) not in kept]:
            self.drop(each)

    def fill(self, copy: Saved | Checkpoint, data: NDArray[np.uint8]) -> None:
        if data.nbytes > self.capacity:
            self.drop(copy)
        if copy not in self._copies:
            return
        filled = (each for each in list(self._copies) if each.data is not None)
        while self.size + data.nbytes > self.capacity:
            self.drop(next(filled))
        copy.data = data
        self.size += data.nbytes

    def drop(self, copy: Saved | Checkpoint) -> None:
        if copy in self._copies:
            self._copies.remove(copy)
            self.size -= copy.data.nbytes if copy.data is not None else 0
        copy.data = None

    def longest(self, reuse: Callable[[Saved], int]) -> tuple[Saved | None, int]:
        """The entry of which most tokens are of use, and how many those are."""
        best: tuple[Saved | None, int] = (None, 0)
        for saved in self.saved():
            length = reuse(saved)
            if length > best[1]:
                best = (saved, length)
        return best

    def use(self, copy: Saved | Checkpoint) -> None:
        """It was asked for just now."""
        self._copies.remove(copy)
        self._copies.append(copy)

    def saved(self) -> list[Saved]:
        return [each for each in self._copies if isinstance(each, Saved)]
