"""Guessing ahead changes how many tokens a decode brings, never which."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
from rigs import LLAMA, Jobs, Rig, all_of, assert_same_up_to_ties, loaded, stream, text_of, tokens_of

from citadel.engine import EngineSpec, Job, Piece, Sampling
from engines.llama_context import Batch, Context
from engines.llama_options import Settings
from engines.llama_worker import Begin, Decoder

VOCABULARY = 12
END = 0


class Words:
    """A vocabulary of a dozen tokens, each a letter; 0 ends the output."""

    size = VOCABULARY
    ends = frozenset({END})

    @staticmethod
    def is_end(token: int) -> bool:
        return token == END

    @staticmethod
    def piece(token: int) -> bytes:
        return bytes([97 + token])


class OnlyEven:
    """A grammar: even tokens, and after seven of them nothing more."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, token: int) -> bool:
        self.taken += token % 2 == 0
        return token % 2 == 0

    def allowed(self) -> np.ndarray[Any, Any]:
        return np.arange(VOCABULARY) % 2 == 0

    @property
    def complete(self) -> bool:
        return self.taken == 7


class ExactContext:
    """In place of llama.cpp: the logits behind a token depend on the tokens before it, and not on the batch.

    Mostly what followed the last two tokens before is likely, so that some guesses are right and some wrong.
    """

    batch_size, sequences, cells, can_trim, window, copied, can_share = 64, 4, 600, True, 0, 0, True
    team = None

    def __init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(self.sequences)]
        self.rows: list[list[int]] = []
        self.decodes = 0

    def decode(self, batch: Batch) -> int:
        self.decodes += 1
        self.rows = []
        for place in range(batch.count):
            tokens = self.held[batch.sequence[place]]
            assert batch.position[place] == len(tokens)
            tokens.append(int(batch.token[place]))
            if batch.output[place]:
                self.rows.append(tokens[:])
        return 0

    def logits(self) -> np.ndarray[Any, Any]:
        return np.array([self._behind(tokens) for tokens in self.rows], np.float32)

    def _behind(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        random = np.random.default_rng(tokens)
        logits = random.normal(0, 1, VOCABULARY)
        logits[END] -= 3
        for place in range(len(tokens) - 2):
            if tokens[place : place + 2] == tokens[-2:] and random.random() < 0.9:
                logits[tokens[place + 2]] += 3
        return logits

    def truncate(self, sequence: int, length: int) -> None:
        del self.held[sequence][length:]

    def share(self, source: int, target: int, length: int) -> None:
        self.held[target] = self.held[source][:length]

    def rewind(self) -> None:
        pass


SETTINGS = Settings({}, {"n_ubatch": 32}, None, 8, 0, draft=0, ngram=2)
GUESSING = Settings({}, {"n_ubatch": 32}, None, 8, 0, draft=8, ngram=2)


class Played:
    def __init__(self, settings: Settings) -> None:
        self.context = ExactContext()
        self.decoder = Decoder(self.context, Words, 100, settings)  # type: ignore[arg-type]
        self.pieces: dict[str, list[Piece]] = {}

    def begin(self, job: Job, matcher: Any = None) -> None:
        self.pieces[job.id] = []
        self.decoder.begin(Begin(job, matcher))

    def step(self) -> None:
        self.decoder.step()
        for happened in self.decoder.news:
            if isinstance(happened.made, Piece):
                self.pieces[happened.job_id].append(happened.made)
        self.decoder.news.clear()

    def finish(self) -> int:
        while self.decoder.tasks:
            self.step()
        return self.context.decodes


ROUND = [1, 2, 3, 4, 5] * 4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 5},
    "hot": {"temperature": 2.0, "seed": 6},
    "penalties": {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "to the end of the context": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1000},
    "at least": {"seed": 8, "min_tokens": 30},
    "a stop token": {"temperature": 0.0, "stop_token_ids": (4,)},
}


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "held to a grammar"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_piece_is_the_same_as_without(kind: str, grammar: bool):
    both = [Played(SETTINGS), Played(GUESSING)]
    for played in both:
        for number in range(3):
            prompt = [6 + number, *ROUND]
            job = Job(str(number), prompt, Sampling(**{"max_tokens": 60, **KINDS[kind]}))
            played.begin(job, OnlyEven() if grammar else None)
    plain, guessed = (played.finish() for played in both)
    assert both[0].pieces == both[1].pieces
    assert guessed <= plain


def test_fewer_decodes_bring_the_same():
    plain, guessed = Played(SETTINGS), Played(GUESSING)
    for played in (plain, guessed):
        played.begin(Job("a", ROUND, Sampling(max_tokens=70, temperature=0, ignore_eos=True)))
    assert guessed.finish() < plain.finish() / 2
    assert [len(piece.token_ids) for piece in guessed.pieces["a"]] == [1] * 70


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_is_kept_to_the_token(most: int):
    guessed = Played(GUESSING)
    guessed.begin(Job("a", ROUND, Sampling(max_tokens=most, temperature=0, ignore_eos=True)))
    guessed.finish()
    pieces = guessed.pieces["a"]
    assert len(pieces) == most
    assert [piece.finish for piece in pieces] == [None] * (most - 1) + ["length"]


def test_a_job_that_is_aborted_amid_a_guess_leaves_nothing_wrong_behind():
    for steps in range(2, 9):
        guessed, fresh = Played(GUESSING), Played(SETTINGS)
        guessed.begin(Job("a", ROUND, Sampling(max_tokens=70, temperature=0, ignore_eos=True)))
        for _ in range(steps):
            guessed.step()
        guessed.decoder.abort("a")
        onward = [*ROUND, *tokens_of(guessed.pieces["a"]), 9, 9]
        for played in (guessed, fresh):
            played.begin(Job("b", onward, Sampling(max_tokens=20, temperature=0)))
            played.finish()
        assert tokens_of(guessed.pieces["b"]) == tokens_of(fresh.pieces["b"])
        assert guessed.pieces["b"][0].cached_tokens == len(onward) - 3


# On llama.cpp.


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


LIST = "Repeat this list, word for word: " + ", ".join(
    f"the {colour} {thing}" for colour in ("red", "green", "blue") for thing in ("house", "ship", "hat")
)
REAL = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]


def real(test: Any) -> Any:
    for mark in REAL:
        test = mark(test)
    return test


@real
async def test_on_a_real_model_the_text_is_the_same_in_fewer_decodes(
    spec: EngineSpec, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    decode, count = Context.decode, [0]

    def counted(context: Context, batch: Batch) -> int:
        count[0] += 1
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", counted)
    async with loaded(LLAMA, spec) as plain:
        alone = [
            await all_of(plain, jobs.make(text, 40, logprobs=5, ignore_eos=True)) for text in (LIST, "Tell a joke.")
        ]
    without, count[0] = count[0], 0
    async with loaded(LLAMA, spec, speculative="ngram") as guessing:
        other = [await all_of(guessing, jobs.make(text, 40, ignore_eos=True)) for text in (LIST, "Tell a joke.")]
        assert count[0] < 0.8 * without
        together = await asyncio.gather(
            *(all_of(guessing, jobs.make(text, 40, ignore_eos=True)) for text in (LIST, "Tell a joke."))
        )
        sampled = [await all_of(guessing, jobs.make(LIST, 24, temperature=1.0, seed=3)) for _ in range(2)]
        colours = 'start: COLOUR (", " COLOUR){5}\nCOLOUR: "red" | "green" | "blue"'
        held = await all_of(guessing, jobs.make(LIST, 30, grammar=colours))
    for one, two, three in zip(alone, other, together, strict=True):
        assert_same_up_to_ties(one, two)
        assert_same_up_to_ties(one, three)
    assert tokens_of(sampled[0]) == tokens_of(sampled[1])
    assert len(text_of(held).split(", ")) == 6


@real
async def test_a_consumer_that_leaves_amid_a_guess_disturbs_no_later_job(spec: EngineSpec, jobs: Jobs):
    prompt = jobs.tokens(LIST)
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    async with loaded(LLAMA, spec, speculative="ngram") as guessing:
        for taken in (1, 9):
            async with aclosing(stream(guessing, jobs.of(prompt, sampling))) as pieces:
                for _ in range(taken):
                    await anext(pieces)
        again = await all_of(guessing, jobs.of(prompt, sampling))
    async with loaded(LLAMA, spec) as plain:
        alone = await all_of(
            plain, jobs.of(prompt, Sampling(max_tokens=30, temperature=0, ignore_eos=True, logprobs=5))
        )
    assert_same_up_to_ties(alone, again)
