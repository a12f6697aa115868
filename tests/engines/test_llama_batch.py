"""The batch planner against a model of llama.cpp's memory that refuses what llama.cpp would get wrong."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.llama_batch import Planner
from engines.llama_cache import Archive, Checkpoint, Saved, common
from engines.llama_draft import guess
from engines.llama_step import GoBack, Limits, Restore, Rewind, Run, Save, Share, Step, Truncate, Work


class Hollow:
    """A cell of a copy that was brought back without what layers with a window have there."""


class Memory:
    """What llama.cpp holds: per sequence the token at each position. A cell is shared by identity."""

    def __init__(self, limits: Limits, cells: int) -> None:
        self.limits = limits
        self.cells = cells
        self.held: list[list[tuple[int, object]]] = [[] for _ in range(limits.sequences)]
        self.fails = 0
        """How many of the next copies can't be brought back."""
        self.lost: dict[int, Restore | GoBack] = {}

    @property
    def used(self) -> int:
        return len({id(cell) for sequence in self.held for _, cell in sequence})

    def move(self, step: Step, archive: Archive) -> bool:
        """False where a copy could not be brought back."""
        self.lost = {}
        for move in step.moves:
            if isinstance(move, Rewind) or (isinstance(move, GoBack) and move.sequence in self.lost):
                continue
            if isinstance(move, Save):
                self._copy(move.saved, move.sequence, archive)
            elif isinstance(move, Restore):
                assert not self.held[move.sequence], "bringing back into a sequence that holds tokens"
                self.fails -= 1
                if self.fails >= 0 or move.saved.data is None or self.used + len(move.saved.tokens) > self.cells:
                    self.lost[move.sequence] = move
                else:
                    tokens = move.saved.tokens
                    whole = self.limits.copied or len(tokens)
                    self.held[move.sequence] = [
                        (token, object() if at + whole >= len(tokens) else Hollow()) for at, token in enumerate(tokens)
                    ]
            elif isinstance(move, GoBack):
                self.fails -= 1
                if self.fails >= 0 or move.checkpoint.data is None:
                    self.lost[move.sequence] = move
                    self.held[move.sequence] = []
                else:
                    held, length = self.held[move.sequence], move.checkpoint.length
                    assert length < len(held)
                    assert [token for token, _ in held[:length]] == list(move.checkpoint.data), (
                        "a checkpoint of another"
                    )
                    del held[length:]
            elif isinstance(move, Share):
                assert self.limits.share
                assert not self.held[move.target], "sharing into a sequence that holds tokens"
                assert 0 < move.length <= len(self.held[move.source])
                self.held[move.target] = self.held[move.source][: move.length]
            else:
                held = self.held[move.sequence]
                assert move.length == 0 or self.limits.trim or len(held) <= self.limits.window
                assert move.sequence in self.lost or move.length < len(held)
                del held[move.length :]
        return not self.lost

    def _copy(self, copy: Saved | Checkpoint, sequence: int, archive: Archive) -> None:
        archive.fill(copy, np.array([token for token, _ in self.held[sequence]], np.uint8))
        assert archive.size <= archive.capacity

    def take_checkpoints(self, step: Step, archive: Archive) -> None:
        for work in step.work:
            if work.checkpoint:
                assert work.checkpoint.length == len(self.held[work.sequence])
                self._copy(work.checkpoint, work.sequence, archive)

    def compute(self, step: Step) -> bool:
        tokens = sum(work.size for work in step.work)
        assert tokens <= self.limits.batch
        if self.used + tokens > self.cells:
            return False
        for work in step.work:
            sequence = self.held[work.sequence]
            assert work.start == len(sequence), "a position is computed twice, or one is skipped"
            assert work.start < work.stop <= len(work.run.tokens)
            assert [token for token, _ in sequence] == list(work.run.tokens[: work.start])
            assert not any(isinstance(cell, Hollow) for _, cell in sequence[-self.limits.copied or 0 :])
            assert not work.draft or work.last
            assert work.stop + len(work.draft) < max(work.run.most, work.stop + 1), "a guess at what is not wanted"
            sequence.extend((token, object()) for token in work.tokens)
        return True


class Bench:
    """A planner, its memory, and runs whose output is the same wherever and whenever it is computed."""

    def __init__(
        self,
        sequences: int = 4,
        cells: int = 1000,
        *,
        real_cells: int | None = None,
        archive: int = 0,
        **limits: object,
    ) -> None:
        values: dict[str, object] = {"batch": 64, "prompt": 32, "prompt_beside": 8, **limits}
        self.limits = Limits(sequences=sequences, cells=cells, **values)  # type: ignore[arg-type]
        self.planner = Planner(self.limits, Archive(archive))
        self.memory = Memory(self.limits, cells if real_cells is None else real_cells)
        self.wanted: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.full: set[str] = set()
        self.runs: dict[str, Run] = {}

    def add(self, name: str, prompt: list[int], outputs: int) -> Run:
        run = Run(name, array("i", prompt), most=len(prompt) + outputs)
        self.runs[name], self.wanted[name], self.outputs[name] = run, outputs, []
        self.planner.add(run)
        return run

    def drop(self, name: str) -> None:
        self.planner.drop(self.runs.pop(name))

    def step(self) -> Step:
        step = self.planner.plan()
        assert self.planner.cells.used <= self.planner.capacity or not self.planner.seated()
        if not self.memory.move(step, self.planner.archive):
            for move in self.memory.lost.values():
                self.planner.lost(move)
            return step
        if step.full:
            self.full.add(step.full.id)
            self.drop(step.full.id)
            return step
        assert step.work, "runs are there and nothing is computed"
        if not self.memory.compute(step):
            self.planner.refused(step)
            return step
        self.planner.done(step)
        self.memory.take_checkpoints(step, self.planner.archive)
        assert self.planner.cells.used == self.memory.used
        for work in step.work:
            if work.last:
                self._choose(work)
        return step

    def _choose(self, work: Work) -> None:
        """A token behind the last one computed, and one behind each guess that is right."""
        run = work.run
        for guessed in (*work.draft, None):
            token = sum(run.tokens) % 7
            run.tokens.append(token)
            self.outputs[run.id].append(token)
            if len(self.outputs[run.id]) == self.wanted[run.id]:
                self.drop(run.id)
                return
            if token != guessed:
                return

    def finish(self) -> int:
        steps = 0
        while self.runs:
            self.step()
            steps += 1
            assert steps < 10_000, "no progress"
        return steps


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % 7)
    return tokens[len(prompt) :]


def test_common_counts_the_tokens_two_arrays_begin_with():
    assert common(array("i"), array("i", [1])) == 0
    assert common(array("i", [1, 2, 3]), array("i", [1, 2, 3, 4])) == 3
    assert common(array("i", [1, 2, 3]), array("i", [1, 9, 3])) == 1


def test_generating_sequences_come_first_and_prompts_share_a_smaller_rest():
    bench = Bench()
    bench.add("old", [1, 2, 3], 20)
    bench.step()
    bench.add("new", list(range(100, 150)), 1)
    step = bench.step()
    assert [(work.run.id, work.stop - work.start) for work in step.work] == [("old", 1), ("new", 8)]


def test_prompts_alone_fill_the_prompt_budget_oldest_first():
    bench = Bench()
    bench.add("a", list(range(20)), 1)
    bench.add("b", list(range(100, 140)), 1)
    step = bench.step()
    assert [(work.run.id, work.stop - work.start) for work in step.work] == [("a", 20), ("b", 12)]


def test_the_next_turn_of_a_conversation_computes_only_what_is_new():
    bench = Bench()
    bench.add("first", list(range(40)), 3)
    bench.finish()
    second = bench.add("second", [*range(40), *bench.outputs["first"], 5, 5], 1)
    bench.finish()
    assert second.cached == 42, "all but the last output token, which was never computed, and what is new"


def test_the_last_prompt_token_is_computed_even_where_all_are_kept():
    bench = Bench()
    bench.add("first", list(range(40)), 1)
    bench.finish()
    again = bench.add("again", list(range(40)), 1)
    step = bench.step()
    assert (again.cached, [(work.start, work.stop) for work in step.work]) == (39, [(39, 40)])


def test_a_running_sequence_lends_its_beginning():
    bench = Bench()
    bench.add("first", list(range(40)), 50)
    bench.step()
    bench.step()
    second = bench.add("second", [*range(40), 7, 7], 1)
    step = bench.step()
    assert second.cached == 40
    assert Share(0, 1, 40) in step.moves


def test_a_run_waits_for_an_older_one_that_is_computing_its_beginning():
    bench = Bench()
    bench.add("first", list(range(60)), 50)
    second = bench.add("second", [*range(60), 7], 1)
    assert [work.run.id for work in bench.step().work] == ["first"]
    bench.finish()
    assert second.cached == 60


def test_a_short_common_beginning_is_not_waited_for():
    bench = Bench()
    bench.add("first", [*range(10), *([1] * 50)], 1)
    bench.add("second", [*range(10), *([2] * 5)], 1)
    bench.step()
    assert len(bench.planner.seated()) == 2


def test_a_short_match_spares_a_long_kept_sequence():
    bench = Bench()
    bench.add("long", list(range(200)), 1)
    bench.finish()
    bench.add("other", [*range(5), 900, 901], 1)
    bench.finish()
    again = bench.add("again", list(range(200)), 1)
    bench.finish()
    assert again.cached == 199


def test_a_prompt_that_was_asked_before_replaces_its_answer():
    bench = Bench()
    for name in ("first", "again", "once more"):
        bench.add(name, list(range(20)), 100)
        bench.finish()
    assert [len(sequence.tokens) for sequence in bench.planner.sequences] == [119, 0, 0, 0]


def test_only_a_run_that_begins_alone_begins_at_the_first_free_cell():
    bench = Bench()
    bench.add("alone", list(range(20)), 100)
    assert Rewind() in bench.step().moves
    bench.add("beside", list(range(100, 120)), 100)
    assert Rewind() not in bench.step().moves


def test_without_sharing_a_run_only_takes_over_an_idle_sequence():
    bench = Bench(share=False)
    bench.add("first", list(range(60)), 50)
    bench.step()
    second = bench.add("second", list(range(60)), 1)
    bench.finish()
    assert second.cached == 0
    third = bench.add("third", list(range(60)), 1)
    bench.finish()
    assert third.cached == 59


def test_a_memory_that_cannot_be_cut_back_is_continued_or_cleared():
    bench = Bench(share=False, trim=False)
    bench.add("first", list(range(30)), 4)
    bench.finish()
    onward = bench.add("onward", [*range(30), *bench.outputs["first"], 9], 2)
    bench.finish()
    assert onward.cached == 33
    aside = bench.add("aside", [*range(20), 9], 1)
    bench.finish()
    assert aside.cached == 0


def test_kept_tokens_go_before_any_run_gives_way():
    bench = Bench(sequences=2, cells=100)
    bench.add("kept", list(range(60)), 1)
    bench.finish()
    bench.add("new", list(range(100, 180)), 10)
    bench.finish()
    assert bench.full == set()
    assert bench.outputs["new"] == expected(list(range(100, 180)), 10)


def test_the_newest_run_gives_way_and_is_computed_again():
    bench = Bench(sequences=2, cells=100)
    bench.add("old", list(range(20)), 60)
    bench.add("new", list(range(100, 120)), 60)
    bench.finish()
    assert bench.full == set()
    assert bench.outputs["old"] == expected(list(range(20)), 60)
    assert bench.outputs["new"] == expected(list(range(100, 120)), 60)


def test_a_run_alone_in_a_full_memory_is_full():
    bench = Bench(sequences=2, cells=50)
    bench.add("a", list(range(30)), 100)
    bench.finish()
    assert bench.full == {"a"}
    assert len(bench.outputs["a"]) == 21, "the token chosen last needs no cell"


def test_less_room_than_counted_is_found_out_and_lived_with():
    bench = Bench(sequences=2, cells=200, real_cells=80)
    bench.add("a", list(range(20)), 40)
    bench.add("b", list(range(100, 120)), 40)
    bench.finish()
    assert bench.full == set()
    assert bench.outputs["b"] == expected(list(range(100, 120)), 40)


def test_a_dropped_run_frees_its_place():
    bench = Bench(sequences=1)
    bench.add("a", list(range(10)), 100)
    bench.step()
    bench.add("b", list(range(50, 60)), 1)
    bench.step()
    assert bench.outputs["b"] == []
    bench.drop("a")
    bench.finish()
    assert len(bench.outputs["b"]) == 1


def conversations(bench: Bench, count: int) -> list[Run]:
    """The second turns of conversations that outnumber the sequences."""
    for number in range(count):
        bench.add(f"first {number}", [number] * 50, 2)
        bench.finish()
    return [bench.add(f"second {number}", [*[number] * 50, 100], 1) for number in range(count)]


def test_conversations_that_lost_their_place_are_brought_back():
    bench = Bench(sequences=2, archive=1000)
    turns = conversations(bench, 6)
    bench.finish()
    assert [run.cached for run in turns] == [50] * 6


def test_what_is_brought_back_without_what_its_windows_need_is_gone_on_from_and_not_cut_back():
    bench = Bench(sequences=2, archive=1000, copied=8)
    for number in range(4):
        bench.add(str(number), [number] * 50, 2)
        bench.finish()
    aside = bench.add("aside", [*[0] * 50, 100], 1)
    bench.finish()
    onward = bench.add("onward", [*[1] * 50, *bench.outputs["1"], 100], 1)
    bench.finish()
    assert (aside.cached, onward.cached) == (0, 51)


def test_without_an_archive_or_where_it_fails_they_are_computed_again():
    for archive, fails in ((0, 0), (1000, 100)):
        bench = Bench(sequences=2, archive=archive)
        bench.memory.fails = fails
        turns = conversations(bench, 6)
        bench.finish()
        assert sum(run.cached == 0 for run in turns) >= 4
        assert bench.outputs["second 3"] == expected([*[3] * 50, 100], 1)


def test_the_archive_forgets_what_is_longest_unused_and_stays_inside_its_bound():
    bench = Bench(sequences=1, archive=160)
    for number in range(5):
        bench.add(str(number), [number] * 50, 2)
        bench.finish()
    assert (len(bench.planner.archive), bench.planner.archive.size) == (3, 153)
    gone = bench.add("0 again", [0] * 50, 1)
    bench.finish()
    assert gone.cached == 0


def test_a_copy_that_continues_another_takes_its_place():
    archive = Archive(100)
    archive.fill(archive.promise(array("i", [1, 2])), np.zeros(40, np.uint8))
    archive.fill(archive.promise(array("i", [1, 2, 3])), np.zeros(90, np.uint8))
    assert (len(archive), archive.size) == (1, 90)
    archive.fill(archive.promise(array("i", [9])), np.zeros(101, np.uint8))
    assert (len(archive), archive.size) == (1, 90), "what is larger than the bound is not kept at all"


ROUND = [1, *[1, 2, 4] * 5]
"""A prompt that goes on in its own way: 1, 2, 4, 1, 2, 4."""


def test_what_followed_the_same_tokens_before_is_guessed():
    assert list(guess(array("i", [1, 2, 3, 4, 5, 9, 1, 2, 3]), 3, 2)) == [4, 5]
    assert list(guess(array("i", [1, 2, 3, 4, 5, 9, 2, 3]), 3, 2)) == [], "only two tokens are the same"
    assert list(guess(array("i", [8, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3]), 2, 1)) == [4], "three are the same there"
    assert list(guess(array("i", [2, 3, 4, 9, 2, 3, 5, 8, 2, 3]), 2, 1)) == [5], "the later of two that are as good"
    assert list(guess(array("i", [7, 1, 2, 3, 1, 2, 3, 1, 2]), 1, 9)) == [3, 1, 2, 3, 1], (
        "five are the same; round again"
    )
    assert list(guess(array("i", [1, 2, 3]), 3, 2)) == list(guess(array("i", [1, 1]), 1, 0)) == []


def test_right_guesses_save_steps_and_grow():
    plain, bench = Bench(), Bench(draft=8, ngram=3)
    for each in (plain, bench):
        each.add("a", ROUND, 50)
    sizes = list[int]()
    while bench.runs:
        sizes.append(bench.step().work[0].size)
    assert bench.outputs["a"] == expected(ROUND, 50)
    assert sizes[:4] == [16, 5, 9, 9]
    assert len(sizes) < plain.finish() / 4


def test_what_is_wrong_of_a_guess_is_forgotten_before_anything_else_is_done():
    bench = Bench(draft=8, ngram=1)
    run = bench.add("a", [2, 9, 5], 50)
    bench.step()
    work = bench.step().work[0]
    assert (list(work.draft), work.outputs) == ([9], 2)
    assert list(run.tokens) == [2, 9, 5, 2, 4], "and 4 was not guessed"
    assert Truncate(0, 4) in bench.step().moves
    assert run.guess == 1, "the next guess is short"


def test_nothing_is_guessed_beside_a_prompt_or_in_a_crowd_or_beyond_what_is_wanted():
    bench = Bench(draft=8, ngram=3, sequences=6)
    bench.add("a", ROUND, 50)
    bench.step()
    bench.add("b", list(range(100, 116)), 50)
    assert [work.draft for work in bench.step().work] == [array("i"), array("i")]
    for number in range(4):
        bench.add(str(number), [number, *ROUND], 50)
    for _ in range(20):
        assert not any(work.draft for work in bench.step().work)
    last = Bench(draft=8, ngram=3)
    last.add("a", ROUND, 3)
    last.step()
    assert [work.size for work in last.step().work] == [2]


def test_a_run_that_ends_amid_its_guess_leaves_what_was_right():
    bench = Bench(draft=8, ngram=3)
    bench.add("a", ROUND, 50)
    bench.step()
    bench.step()
    bench.drop("a")
    onward = bench.add("b", [*ROUND, *bench.outputs["a"], 30], 1)
    bench.finish()
    assert onward.cached == len(ROUND) + len(bench.outputs["a"]) - 1


BEGINNINGS = [[], ROUND, [1] * 40, [1] * 20 + [2] * 30, list(range(10, 70))]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from(BEGINNINGS),
            st.lists(st.integers(0, 3), min_size=1, max_size=20),
            st.integers(1, 30),
        ),
        st.tuples(st.just("drop"), st.integers(0, 50)),
        st.tuples(st.just("step"), st.integers(1, 10)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    actions=ACTIONS,
    sequences=st.integers(1, 5),
    cells=st.integers(8, 300),
    shortfall=st.integers(0, 100),
    kind=st.sampled_from([(True, True, 0), (True, False, 0), (False, False, 0), (False, False, 30)]),
    copied=st.sampled_from([0, 4, 30]),
    archive=st.sampled_from([0, 60, 300]),
    fails=st.integers(0, 3),
    batch=st.integers(5, 40),
    draft=st.sampled_from([0, 3, 16]),
    ngram=st.integers(1, 3),
)
def test_whatever_comes_no_run_is_lost_and_each_position_is_computed_once(
    actions: list[tuple[object, ...]],
    sequences: int,
    cells: int,
    shortfall: int,
    kind: tuple[bool, bool, int],
    copied: int,
    archive: int,
    fails: int,
    batch: int,
    draft: int,
    ngram: int,
):
    trim, share, window = kind
    bench = Bench(
        sequences,
        cells,
        real_cells=max(4, cells - shortfall),
        archive=archive,
        batch=batch,
        prompt=batch,
        prompt_beside=max(1, batch // 4),
        trim=trim,
        share=share,
        window=window,
        copied=copied if trim else 0,
        draft=draft if trim else 0,
        ngram=ngram,
    )
    bench.memory.fails = fails
    prompts: dict[str, list[int]] = {}
    dropped: set[str] = set()
    for number, action in enumerate(actions):
        match action:
            case ("add", list(beginning), list(rest), int(outputs)):
                name = str(number)
                prompts[name] = [*beginning, *rest]
                bench.add(name, prompts[name], outputs)
            case ("drop", int(which)) if bench.runs:
                name = sorted(bench.runs)[which % len(bench.runs)]
                dropped.add(name)
                bench.drop(name)
            case ("step", int(count)):
                for _ in range(count):
                    if bench.runs:
                        bench.step()
    bench.finish()
    for name, prompt in prompts.items():
        got = bench.outputs[name]
        assert got == expected(prompt, len(got))
        assert name in dropped | bench.full or len(got) == bench.wanted[name]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8))
def test_runs_that_each_fit_alone_all_end_in_full(lengths: list[tuple[int, int]]):
    bench = Bench(sequences=8, cells=100)
    for number, (prompt, outputs) in enumerate(lengths):
        bench.add(str(number), [number * 1000 + place for place in range(prompt)], min(outputs, 100 - prompt))
    bench.finish()
    assert bench.full == set()
