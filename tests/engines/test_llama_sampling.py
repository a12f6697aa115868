"""How the llama engine chooses tokens: sampling, logprobs, grammars; on a real model."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise

import pytest

pytest.importorskip("llama_cpp")
from rigs import LLAMA, Jobs, Rig, all_of, assert_same_up_to_ties, text_of, tokens_of

from citadel.engine import Engine, Tokenizer
from citadel.errors import BadRequest, EdgeError
from engines.llama_sampling import Chooser

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


async def test_a_bias_forces_and_forbids_tokens(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    (wanted,) = tokenizer.encode(" banana")
    forced = await all_of(engine, jobs.make("Say something.", 3, logit_bias={wanted: 100.0}))
    assert tokens_of(forced) == [wanted] * 3
    free = tokens_of(await all_of(engine, jobs.make("Say something.", 1)))[0]
    without = await all_of(engine, jobs.make("Say something.", 8, logit_bias={free: -100.0}))
    assert free not in tokens_of(without)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
async def test_penalties_are_for_tokens_of_the_output(engine: Engine, jobs: Jobs, penalty: str):
    job = jobs.make("Repeat: one one one one one one", 24, ignore_eos=True, **{penalty: 1000.0})
    tokens = tokens_of(await all_of(engine, job))
    assert len(set(tokens)) == len(tokens)


async def test_the_repetition_penalty_is_for_tokens_of_the_prompt_too(engine: Engine, jobs: Jobs):
    job = jobs.make("Repeat: one one one one one one", 24, ignore_eos=True, repetition_penalty=1e6)
    tokens = tokens_of(await all_of(engine, job))
    assert len(set(tokens)) == len(tokens)
    assert not set(tokens) & set(job.prompt)


async def test_seeds_make_outputs_that_differ_and_repeat(engine: Engine, jobs: Jobs):
    async def run(seed: int | None) -> list[int]:
        return tokens_of(await all_of(engine, jobs.make("Tell a story.", 16, temperature=1.5, seed=seed)))

    await run(0)
    assert await run(1) == await run(1)
    assert await run(1) != await run(2)
    assert await run(None) != await run(None)
    assert await run(2**32 - 1) == await run(2**32 - 1), "the value that means random to llama.cpp"


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
async def test_truncation_to_one_token_is_greedy(engine: Engine, jobs: Jobs, sampling: dict[str, float]):
    await all_of(engine, jobs.make("Tell a story.", 1))
    greedy = await all_of(engine, jobs.make("Tell a story.", 16, logprobs=5))
    drawn = await all_of(engine, jobs.make("Tell a story.", 16, temperature=5.0, **sampling))
    assert_same_up_to_ties(greedy, drawn)


async def test_the_temperature_comes_before_top_p(engine: Engine, jobs: Jobs):
    """At a high temperature the same `top_p` lets many more tokens through."""

    async def firsts(temperature: float) -> set[int]:
        made = [jobs.make("Name a thing.", 1, temperature=temperature, top_p=0.9, seed=seed) for seed in range(40)]
        return {tokens_of(await all_of(engine, job))[0] for job in made}

    assert len(await firsts(0.3)) < len(await firsts(4.0))


async def test_an_end_is_banned_until_min_tokens(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    (end,) = tokenizer.encode(tokenizer.special_tokens["eos_token"])
    pieces = await all_of(engine, jobs.make("Say yes.", 20, min_tokens=5, logit_bias={end: 100.0}))
    assert len(tokens_of(pieces)) == 6
    assert tokens_of(pieces)[-1] == end
    assert pieces[-1].finish == "stop"


async def test_ignore_eos_bans_every_end(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    (end,) = tokenizer.encode(tokenizer.special_tokens["eos_token"])
    pieces = await all_of(engine, jobs.make("Say yes.", 20, ignore_eos=True, logit_bias={end: 100.0}))
    assert len(tokens_of(pieces)) == 20
    assert end not in tokens_of(pieces)


async def test_logprobs_are_a_distribution(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    size = tokenizer.vocabulary_size
    (piece, *_) = await all_of(engine, jobs.make("Tell a story.", 1, logprobs=size))
    (entry,) = piece.logprobs
    assert len({each.token_id for each in entry.top}) == size
    assert math.fsum(math.exp(each.logprob) for each in entry.top) == pytest.approx(1, abs=1e-4)
    assert all(left.logprob >= right.logprob for left, right in pairwise(entry.top))


# Grammars.


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_a_json_schema_holds(engine: Engine, jobs: Jobs, temperature: float):
    grammar = f"start: %json {json.dumps(SCHEMA)}"
    job = jobs.make("Describe a person.", 120, grammar=grammar, temperature=temperature, seed=3)
    pieces = await all_of(engine, job)
    value = json.loads(text_of(pieces))
    assert set(value) == {"name", "age"}
    assert value["age"] % 5 == 0
    assert pieces[-1].finish == "stop"


async def test_a_choice_holds_against_what_the_model_would_say(engine: Engine, jobs: Jobs):
    job = jobs.make("What is the capital of France?", 10, grammar='start: "Oslo" | "Lima"')
    assert text_of(await all_of(engine, job)) in {"Oslo", "Lima"}


@pytest.mark.parametrize("words", [1, 6])
async def test_the_end_is_allowed_only_where_the_grammar_accepts(
    engine: Engine, jobs: Jobs, tokenizer: Tokenizer, words: int
):
    (end,) = tokenizer.encode(tokenizer.special_tokens["eos_token"])
    grammar = f"start: WORD{{{words},}}\nWORD: /[a-z]+ /"
    job = jobs.make("Say yes.", 60, grammar=grammar, logit_bias={end: 100.0})
    pieces = await all_of(engine, job)
    assert text_of(pieces).count(" ") == words
    assert tokens_of(pieces)[-1] == end


async def test_a_grammar_names_special_tokens(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    name = tokenizer.special_tokens["bos_token"]
    (token,) = tokenizer.encode(name)
    for written in (name, f"<[{token}]>"):
        job = jobs.make("Say yes.", 10, grammar=f'start: "call" {written} "done"')
        pieces = await all_of(engine, job)
        assert text_of(pieces) == f"call{name}done"
        assert token in tokens_of(pieces)


async def test_a_grammar_that_allows_only_a_banned_end_ends_the_output(engine: Engine, jobs: Jobs):
    job = jobs.make("Say yes.", 10, grammar='start: "yes" | "yes" "!"', ignore_eos=True, logit_bias={0: 0.0})
    pieces = await all_of(engine, job)
    assert text_of(pieces) == "yes!"
    assert pieces[-1].finish == "stop"


@pytest.mark.parametrize("grammar", ["start: nowhere", "not lark at all ((", 'start: %json {"type": 7}'])
async def test_a_grammar_that_cannot_be_compiled_is_a_bad_request(engine: Engine, jobs: Jobs, grammar: str):
    with pytest.raises(BadRequest, match="grammar"):
        await all_of(engine, jobs.make("Say yes.", 10, grammar=grammar))
    assert engine.dead is None


async def test_jobs_with_and_without_grammars_run_together(engine: Engine, jobs: Jobs):
    made = [jobs.make(f"Number {number}: say yes.", 12, grammar='start: "no, " /[a-z]{5}/') for number in range(2)]
    made += [jobs.make(f"Number {number}: say yes.", 12) for number in range(2)]
    outputs = await asyncio.gather(*(all_of(engine, job) for job in made))
    assert [text_of(pieces).startswith("no, ") for pieces in outputs[:2]] == [True, True]


async def test_an_output_that_is_no_number_ends_its_job_alone(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    choose = Chooser.choose
    broken = jobs.make("Number 1: tell a story.", 20, ignore_eos=True, top_k=7)

    def spoiled(chooser: Chooser, logits, draw):
        if chooser._sampling.top_k == 7:
            logits[:] = float("nan")
        return choose(chooser, logits, draw)

    monkeypatch.setattr(Chooser, "choose", spoiled)
    fine, failed = await asyncio.gather(
        all_of(engine, jobs.make("Number 2: tell a story.", 20, ignore_eos=True)),
        all_of(engine, broken),
        return_exceptions=True,
    )
    assert isinstance(failed, EdgeError)
    assert isinstance(fine, list)
    assert len(tokens_of(fine)) == 20
