"""Which sequence computes which tokens next: plain decisions over plain data (llama_step.py).

A `Run` is what has to be computed: the tokens of a prompt, and of the output as it grows. A `Sequence` is a place in
llama.cpp's memory: the tokens that are computed there, kept after their run ends so that a later run with the same
beginning need not compute them again. A run holds one sequence; what it has beyond that sequence's tokens is pending.
When nothing is pending the caller chooses the run's next token from the logits and appends it.

`Planner.plan()` returns a `Step`: moves for llama.cpp's memory, in order, then the work of one decode. The caller does
both and reports `done()`, or `refused()` where llama.cpp found no room. Between the two nothing else may be called.

1. A waiting run is seated, in the order of arrival, on the sequence with the longest common beginning, or on the
   longest unused one, to which another's beginning is shared where that is allowed. It waits while an older run is
   still computing more of its beginning, and while the memory has no room for it.
2. Every sequence with one token pending computes it. Prompts share what is left of the batch, oldest first; fewer
   tokens while others are generating, since all of them wait for the whole batch.
3. When memory runs out, the longest unused kept tokens go first, then the newest run: it waits, and is computed again
   later. A last run that fills the memory alone is `full`: its output ends there.
4. Kept tokens that go are copied to the archive, and copied back for a run that shares more with them than with any
   sequence. Where that fails the caller reports `lost()` instead of computing the step.
5. A sequence that can't be cut back goes back to a checkpoint. They are taken where a later run may need them.
6. While few sequences generate and no prompt is there, each may compute a guess at its next tokens too. The caller
   chooses a token behind each of them, as far as they are right; the next step begins with forgetting the others.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from engines.llama_cache import Archive, Checkpoint, common
from engines.llama_cells import Cells
from engines.llama_draft import DRAFTING, guess, longer
from engines.llama_step import GoBack, Restore, Rewind, Save, Sequence, Share, Step, Truncate, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engines.llama_cache import Saved
    from engines.llama_step import Limits, Move, Run

WORTH_WAITING: Final = 32
"""A common beginning of fewer tokens is computed again rather than waited for."""
BEFORE_END: Final = 8
"""So many tokens before the end of a prompt is a checkpoint: as many as a template begins an answer with, at most."""
_GROWTH: Final = 16
"""Cells per seated run that must be free before another is seated: it would give way again at once."""


class Planner:
    def __init__(self, limits: Limits, archive: Archive | None = None) -> None:
        self.limits = limits
        self.archive = Archive(0) if archive is None else archive
        self.sequences = [Sequence(number) for number in range(limits.sequences)]
        self.waiting: list[Run] = []
        self.cells = Cells()
        self.capacity = limits.cells
        self._arrivals = 0
        self._clock = 0
        self._moves: list[Move] = []
        self._guessed: list[Work] = []

    # What the caller tells.

    def add(self, run: Run) -> None:
        self._arrivals += 1
        run.order = self._arrivals
        self.waiting.append(run)

    def drop(self, run: Run) -> None:
        """The run has ended; what it computed stays until the place is needed."""
        for sequence in self.sequences:
            if sequence.run is run:
                sequence.run = None
                self._touch(sequence)
        self.waiting = [other for other in self.waiting if other is not run]

    def done(self, step: Step) -> None:
        for work in step.work:
            sequence = self.sequences[work.sequence]
            sequence.tokens.extend(work.tokens)
            sequence.cells.extend(self.cells.take(work.size))
            if work.checkpoint:
                sequence.checkpoints.append(work.checkpoint)
                self.archive.promise_checkpoint(work.checkpoint)
        self._guessed = [work for work in step.work if work.draft]

    def refused(self, step: Step) -> None:
        """llama.cpp has less room than we counted: believe in half of what we tried."""
        asked = sum(work.size for work in step.work)
        self.capacity = self.cells.used + asked // 2

    def lost(self, move: Restore | GoBack) -> None:
        """The copy could not be brought back: the sequence is empty, and nothing of the step is computed."""
        sequence = self.sequences[move.sequence]
        self.cells.release(sequence.cells)
        sequence.tokens, sequence.cells, sequence.checkpoints, sequence.floor = array("i"), [], [], 0
        move.run.cached = move.cached or 0
        self.archive.drop(move.saved if isinstance(move, Restore) else move.checkpoint)

    # What the caller asks.

    def plan(self) -> Step:
        self._moves = []
        self._forget_wrong_guesses()
        if not self.seated():
            self.capacity = self.limits.cells
        self._seat_waiting()
        full = self._make_room()
        work = () if full else tuple(self._share_out())
        return Step(tuple(self._moves), work, full)

    @property
    def free(self) -> int:
        return self.capacity - self.cells.used

    def seated(self) -> list[Sequence]:
        """The sequences with a run, oldest first."""
        return sorted((s for s in self.sequences if s.run), key=_order)

    # Seating.

    def _seat_waiting(self) -> None:
        for run in sorted(self.waiting, key=lambda run: run.order):
            idle = [s for s in self.sequences if s.run is None]
            if not idle:
                return
            source, length = self._longest(run)
            if self._better_soon(run, length):
                continue
            if not self._has_room(run, source, length):
                return
            if self._restore(run, length, idle):
                # What is brought back may turn out to be lost; so nobody shares it in this step.
                return
            source, length = self._longest(run)
            self._seat(run, source, length, idle)
            self.waiting.remove(run)

    def _longest(self, run: Run) -> tuple[Sequence | None, int]:
        """The sequence that shares most with the run; the last token is always computed, for its logits."""
        best: tuple[Sequence | None, int] = (None, 0)
        for sequence in self.sequences:
            if sequence.run and not self.limits.share:
                continue
            length = self._reusable(run, sequence)
            if length > best[1]:
                best = (sequence, length)
        return best

    def _reusable(self, run: Run, kept: Sequence | Saved) -> int:
        """How many of the tokens that are kept the run can begin with."""
        length = min(common(kept.tokens, run.tokens), len(run.tokens) - 1)
        if length == len(kept.tokens) or self._can_cut(kept, length):
            return length
        return max(
            (each.length for each in kept.checkpoints if each.length <= length and each.data is not None), default=0
        )

    def _can_cut(self, kept: Sequence | Saved, length: int) -> bool:
        return length >= kept.floor and (self.limits.trim or len(kept.tokens) <= self.limits.window)

    def _better_soon(self, run: Run, length: int) -> bool:
        """An older run is the best source for this one's beginning, and is still computing it."""
        if not self.limits.share:
            return False
        for sequence in self.sequences:
            if sequence.run is None or len(sequence.tokens) < length:
                continue
            promised = min(common(sequence.run.tokens, run.tokens), len(run.tokens) - 1)
            if promised >= WORTH_WAITING and promised > len(sequence.tokens):
                return True
        return False

    def _has_room(self, run: Run, source: Sequence | None, length: int) -> bool:
        """Room beside the seated runs; kept tokens don't count, they can go."""
        seated = self.seated()
        if not seated:
            return True
        held = len(set[int]().union(*(s.cells for s in seated))) + sum(s.pending for s in seated)
        shared = length if source and source.run else 0
        return held + len(run.tokens) - shared + _GROWTH * (len(seated) + 1) <= self.capacity

    def _seat(self, run: Run, source: Sequence | None, length: int, idle: list[Sequence]) -> None:
        self._mark(run)
        target = min(idle, key=lambda s: s.used)
        if source in idle and self._take_over(run, source, length):
            target = source
        if len(idle) == len(self.sequences):
            # Rounding depends on the cells a sequence is in. A run that begins alone gets the same ones each time.
            self._moves.append(Rewind())
        if target is source:
            self._truncate(target, length, run)
        else:
            self._truncate(target, 0)
            if source:
                self._moves.append(Share(source.id, target.id, length))
                target.tokens.extend(source.tokens[:length])
                target.cells.extend(source.cells[:length])
                target.floor = source.floor
                self.cells.share(target.cells)
        target.run = run
        if run.cached is None:
            run.cached = length
        self._touch(target)

    def _restore(self, run: Run, length: int, idle: list[Sequence]) -> bool:
        """Seats the run on a copy from the archive, where that has more of it than any sequence."""
        saved, found = self.archive.longest(lambda saved: self._reusable(run, saved))
        if saved is None or found < length + WORTH_WAITING:
            return False
        size = len(saved.tokens)
        self._mark(run)
        self.archive.use(saved)
        target = min(idle, key=lambda s: s.used)
        self._truncate(target, 0)
        while self.free < size and self._forget_oldest():
            pass
        if self.free < size:
            return False
        self._moves.append(Restore(target.id, saved, run, run.cached))
        target.tokens.extend(saved.tokens)
        target.checkpoints.extend(saved.checkpoints)
        target.floor = saved.floor
        target.cells.extend(self.cells.take(size))
        self._truncate(target, found, run)
        target.run = run
        if run.cached is None:
            run.cached = found
        self.waiting.remove(run)
        self._touch(target)
        return True

    def _take_over(self, run: Run, source: Sequence, length: int) -> bool:
        """Taking an idle sequence over costs what it holds beyond the common beginning, sharing costs another's all.

        A prompt that is there as a whole was asked before, and its new answer replaces the old one.
        """
        return not self.limits.share or length == len(run.tokens) - 1 or 2 * length >= len(source.tokens)

    # Room.

    def _make_room(self) -> Run | None:
        """Frees cells for the next step; the run to end where it is alone and there are none."""
        while seated := self.seated():
            generating = sum(1 for s in seated if s.pending == 1)
            prompts = sum(s.pending for s in seated if s.pending > 1)
            if self.free >= generating + min(prompts, self._prompt_budget(generating)):
                return None
            if self._forget_oldest():
                continue
            if self.free >= generating + (1 if prompts else 0):
                return None
            if len(seated) == 1:
                return seated[0].run
            self._preempt(seated[-1])
        return None

    def _forget_oldest(self) -> bool:
        kept = [s for s in self.sequences if not s.run and s.tokens]
        if kept:
            self._truncate(min(kept, key=lambda s: s.used), 0)
        return bool(kept)

    def _preempt(self, sequence: Sequence) -> None:
        if sequence.run:
            self.waiting.append(sequence.run)
        self._truncate(sequence, 0)
        sequence.run = None

    # The batch.

    def _prompt_budget(self, generating: int) -> int:
        budget = self.limits.prompt_beside if generating else self.limits.prompt
        return max(0, min(budget, self.limits.batch - generating))

    def _share_out(self) -> Iterable[Work]:
        seated = self.seated()
        generating = [s for s in seated if s.pending == 1]
        budget = min(self._prompt_budget(len(generating)), self.free - len(generating))
        room = self._room_for_guesses(seated)
        for sequence in generating:
            work = self._work(sequence, 1, room)
            room -= len(work.draft)
            yield work
        for sequence in seated:
            count = min(sequence.pending, budget, self._until_mark(sequence))
            if sequence.pending > 1 and count > 0:
                yield self._work(sequence, count)
                budget -= count

    def _work(self, sequence: Sequence, count: int, room: int = 0) -> Work:
        run = sequence.run
        if run is None:
            raise RuntimeError(f"sequence {sequence.id} has nothing to compute")
        start = len(sequence.tokens)
        self._touch(sequence)
        draft = guess(
            run.tokens, self.limits.ngram, min(room, self.limits.draft, run.guess, run.most - len(run.tokens) - 1)
        )
        stop = start + count
        checkpoint = Checkpoint(stop) if stop in run.marks else None
        return Work(run, sequence.id, start, stop, stop == len(run.tokens), draft, checkpoint)

    # Guesses.

    def _room_for_guesses(self, seated: list[Sequence]) -> int:
        """How many tokens may be guessed, all together: none where a prompt or too many would wait for them."""
        if not self.limits.draft or len(seated) > DRAFTING or any(s.pending > 1 for s in seated):
            return 0
        return min(self.limits.batch, self.free) - len(seated)

    def _forget_wrong_guesses(self) -> None:
        for work in self._guessed:
            sequence = self.sequences[work.sequence]
            right = common(sequence.tokens, work.run.tokens)
            work.run.guess = min(self.limits.draft, longer(right - work.stop))
            self._cut(sequence, right)
        self._guessed = []

    # Checkpoints.

    def _mark(self, run: Run) -> None:
        """Where a later run may part from this one: where others did, and before the last tokens of its prompt.

        Those are the template's, and the next turn of a conversation often has something else in their place.
        """
        if self.limits.trim or not self.archive.capacity or run.marks:
            return
        parted = max(common(kept.tokens, run.tokens) for kept in (*self.sequences, *self.archive.saved()))
        end = len(run.tokens) - BEFORE_END
        run.marks = (parted, end) if WORTH_WAITING <= parted < end else (end,)

    def _until_mark(self, sequence: Sequence) -> int:
        """How many tokens may be computed before the next checkpoint, or to the end."""
        start = len(sequence.tokens)
        marks = sequence.run.marks if sequence.run else ()
        return next((mark - start for mark in marks if mark > start), sequence.pending)

    # Bookkeeping.

    def _truncate(self, sequence: Sequence, length: int, run: Run | None = None) -> None:
        """`run` is who wants the first `length` tokens."""
        if length < len(sequence.tokens):
            self._archive(sequence, length)
            self._cut(sequence, length, run)

    def _cut(self, sequence: Sequence, length: int, run: Run | None = None) -> None:
        if length >= len(sequence.tokens):
            return
        if length == 0 or run is None or self._can_cut(sequence, length):
            self._moves.append(Truncate(sequence.id, length))
        else:
            checkpoint = next(each for each in sequence.checkpoints if each.length == length)
            self.archive.use(checkpoint)
            self._moves.append(GoBack(sequence.id, checkpoint, run, run.cached))
        self.cells.release(sequence.cells[length:])
        del sequence.tokens[length:]
        del sequence.cells[length:]
        sequence.floor = min(sequence.floor, length)
        if sequence.checkpoints:
            sequence.checkpoints = [each for each in sequence.checkpoints if each.length <= length]
            self.archive.sweep(each for s in self.sequences for each in s.checkpoints)

    def _archive(self, sequence: Sequence, length: int) -> None:
        """Copies kept tokens that go, unless there are few of them or they are elsewhere too."""
        worth = len(sequence.tokens) - length >= WORTH_WAITING and self.archive.capacity
        if sequence.run or not worth or self.archive.holds(sequence.tokens):
            return
        self._moves.append(Save(sequence.id, self.promise(sequence.tokens, sequence.checkpoints)))

    def promise(self, tokens: array[int], checkpoints: Iterable[Checkpoint]) -> Saved:
        """An entry of the archive for the copy of a sequence."""
        size = len(tokens)
        return self.archive.promise(tokens, checkpoints, size if 0 < self.limits.copied < size else 0)

    def _touch(self, sequence: Sequence) -> None:
        self._clock += 1
        sequence.used = self._clock


def _order(sequence: Sequence) -> int:
    return sequence.run.order if sequence.run else 0
