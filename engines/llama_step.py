"""The planner's words: what is to be computed, where it is kept, and what one step does. Plain data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engines.llama_draft import FIRST

if TYPE_CHECKING:
    from engines.llama_cache import Checkpoint, Saved


@dataclass(slots=True, eq=False)
class Run:
    """`order` is its place in the line. `cached` counts the prompt tokens that were there when it was first seated.

    `most` is how many tokens it may come to have, and `guess` how many of its next ones may be guessed. `marks` are
    the lengths at which a checkpoint is worth its memory.
    """

    id: str
    tokens: array[int]
    most: int = 0
    order: int = 0
    cached: int | None = None
    guess: int = FIRST
    marks: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """`cells` are the memory cells of `tokens`; sequences that share a beginning have cells in common.

    `checkpoints` are shorter lengths that it can go back to, where it can't be cut back to any, shortest first.
    It can't be cut back to less than `floor`, but for nothing: it was brought back without what that needs.
    """

    id: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cells: list[int] = field(default_factory=list[int])
    run: Run | None = None
    used: int = 0
    floor: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list["Checkpoint"])

    @property
    def pending(self) -> int:
        return len(self.run.tokens) - len(self.tokens) if self.run else 0


@dataclass(frozen=True, slots=True)
class Truncate:
    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Share:
    """The first `length` tokens of `source` become those of the empty `target` too."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """Look for free cells from the first one on."""


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a sequence to the archive."""

    sequence: int
    saved: Saved


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy all of `saved` to the empty sequence, for `run`, whose `cached` was as given before."""

    sequence: int
    saved: Saved
    run: Run
    cached: int | None


@dataclass(frozen=True, slots=True)
class GoBack:
    """Make a sequence what it was at a checkpoint, for `run`, whose `cached` was as given before."""

    sequence: int
    checkpoint: Checkpoint
    run: Run
    cached: int | None


Move = Truncate | Share | Rewind | Save | Restore | GoBack


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `run.tokens[start:stop]` on `sequence`; `last` when that leaves nothing pending.

    Then `draft`, a guess at what the run goes on with, is computed behind them. `checkpoint` is to be taken after it.
    """

    run: Run
    sequence: int
    start: int
    stop: int
    last: bool
    draft: array[int]
    checkpoint: Checkpoint | None = None

    @property
    def tokens(self) -> array[int]:
        return self.run.tokens[self.start : self.stop] + self.draft

    @property
    def size(self) -> int:
        return self.stop - self.start + len(self.draft)

    @property
    def outputs(self) -> int:
        """How many of the last tokens the run's next one is chosen behind."""
        return 1 + len(self.draft) if self.last else 0


@dataclass(frozen=True, slots=True)
class Step:
    moves: tuple[Move, ...]
    work: tuple[Work, ...]
    full: Run | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """`cells` in all, `batch` tokens per decode, `prompt` of them for prompts, `prompt_beside` when others generate.

    `batch` is at least `sequences`, so that all can generate at once.
    `trim`: a sequence can be cut back; else only one of at most `window` tokens, or to a checkpoint.
    `share`: a sequence can take over another's beginning.
    `copied`: a copy of a longer sequence has not all of it: brought back, that can be gone on from and not cut back.
    0 is no bound.
    `draft` tokens are guessed at once at most, from what followed the last `ngram`; 0 where nothing is to be guessed.
    """

    sequences: int
    cells: int
    batch: int
    prompt: int
    prompt_beside: int
    trim: bool = True
    window: int = 0
    share: bool = True
    copied: int = 0
    draft: int = 0
    ngram: int = 1
