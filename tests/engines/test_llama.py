"""Jobs of the llama engine together: one batch, shared beginnings, scarce memory; on a real model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import psutil
import pytest

pytest.importorskip("llama_cpp")
from rigs import LLAMA, Jobs, Rig, all_of, assert_same_up_to_ties, loaded, tokens_of

from citadel.engine import Engine, EngineSpec, Tokenizer
from engines.llama_context import Batch, Context
from engines.llama_step import Limits

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]

STORY = "Once there lived a fox in a dark forest, and a crow on a tall tree, and they had never met. " * 8


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


async def test_jobs_together_give_what_they_give_alone(engine: Engine, jobs: Jobs):
    questions = [f"Tell me about {thing}." for thing in ("rain", "bread", "ships", "snow")]
    alone = [await all_of(engine, jobs.make(question, 40, logprobs=5)) for question in questions]
    together = await asyncio.gather(*(all_of(engine, jobs.make(question, 40)) for question in questions))
    for one, other in zip(alone, together, strict=True):
        assert_same_up_to_ties(one, other)


async def test_a_running_job_lends_its_beginning_and_the_text_stays_the_same(spec: EngineSpec, jobs: Jobs):
    questions = [f"{STORY} {question}" for question in ("Who lived there?", "Where?", "Go on.", "What is this?")]
    async with loaded(LLAMA, spec) as fresh:
        alone = [await all_of(fresh, jobs.make(question, 24, logprobs=5)) for question in questions]
    async with loaded(LLAMA, spec) as fresh:
        together = await asyncio.gather(*(all_of(fresh, jobs.make(question, 24)) for question in questions))
    for one, other in zip(alone, together, strict=True):
        assert_same_up_to_ties(one, other)
    shared = len(jobs.tokens(STORY)) - 10
    cached = sorted(pieces[0].cached_tokens for pieces in together)
    assert cached[0] == 0, "one of them computed it"
    assert all(count >= shared for count in cached[1:]), "the others waited for it and took it over"


async def test_the_next_turn_computes_only_what_is_new(engine: Engine, jobs: Jobs, tokenizer: Tokenizer):
    prompt = jobs.tokens(STORY)
    first = await all_of(engine, jobs.of(prompt, jobs.make("", 10, ignore_eos=True).sampling))
    onward = [*prompt, *tokens_of(first), *tokenizer.encode("<|im_end|>\n<|im_start|>user\nWhy?")]
    second = await all_of(engine, jobs.of(onward, jobs.make("", 2).sampling))
    assert second[0].cached_tokens == len(prompt) + 9, "all but the last output token, which was never computed"


@pytest.mark.parametrize("counted", [256, 2048], ids=["as counted", "and less is there than counted"])
async def test_when_memory_runs_out_the_newest_waits_and_gives_the_same_text(
    spec: EngineSpec, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, counted: int
):
    questions = [f"Tell me a long story about {thing}." for thing in ("rain", "bread", "ships", "snow")]
    async with loaded(LLAMA, spec) as roomy:
        alone = [await all_of(roomy, jobs.make(each, 70, ignore_eos=True, logprobs=5)) for each in questions]
    monkeypatch.setattr("engines.llama_worker.Limits", lambda **limits: Limits(**{**limits, "cells": counted}))
    async with loaded(LLAMA, replace(spec, context_length=200), n_ctx=256) as tight:
        assert tight.info.context_length == 200
        wanted = [jobs.make(each, 70, ignore_eos=True) for each in questions]
        together = await asyncio.gather(*(all_of(tight, job) for job in wanted))
    for one, other in zip(alone, together, strict=True):
        assert len(tokens_of(other)) == 70
        assert_same_up_to_ties(one, other)


async def test_partitioned_memory_gives_the_same_text(spec: EngineSpec, jobs: Jobs):
    questions = [f"Tell me about {thing}." for thing in ("rain", "bread", "ships", "snow")]
    async with loaded(LLAMA, spec) as unified:
        alone = [await all_of(unified, jobs.make(each, 24, logprobs=5)) for each in questions]
    async with loaded(LLAMA, spec, kv_unified=False) as parts:
        together = await asyncio.gather(*(all_of(parts, jobs.make(each, 24)) for each in questions))
    for one, other in zip(alone, together, strict=True):
        assert_same_up_to_ties(one, other)


async def test_all_levers_at_once_give_each_job_what_it_gets_alone(spec: EngineSpec, jobs: Jobs):
    """Shared beginnings, small shares for prompts, guesses, scarce memory, and copies of what lost its place."""
    beginning = STORY[: len(STORY) // 4]
    questions = [f"{beginning} {question}" for question in ("Who lived there? " * 3, "Where?", "Repeat it.")]
    async with loaded(LLAMA, spec) as fresh:
        alone = [await all_of(fresh, jobs.make(question, 24, logprobs=5, ignore_eos=True)) for question in questions]
    levers = {"speculative": "ngram", "speculative_ngram": 2, "prefill_while_decoding": 8, "n_ctx": 160}
    async with loaded(LLAMA, replace(spec, slots=3, context_length=150), **levers) as engine:
        for _ in range(2):
            wanted = [jobs.make(question, 24, ignore_eos=True) for question in questions]
            for one, other in zip(alone, await asyncio.gather(*(all_of(engine, job) for job in wanted)), strict=True):
                assert_same_up_to_ties(one, other)


async def test_after_aclose_the_thread_computes_nothing_for_the_job(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    decode, sizes = Context.decode, list[int]()

    def counted(context: Context, batch: Batch) -> int:
        sizes.append(batch.count)
        return decode(context, batch)

    monkeypatch.setattr(Context, "decode", counted)
    async with aclosing(engine.generate(jobs.long())) as running:
        await anext(running)
    sizes.clear()
    await all_of(engine, jobs.make("What is the capital of France?", 3, ignore_eos=True))
    assert sizes[1:] == [1, 1], "after the prompt one token at a time, and none of another job"


async def test_a_model_at_rest_keeps_no_threads_to_compute_with(spec: EngineSpec, jobs: Jobs):
    threads = psutil.Process().num_threads
    async with loaded(LLAMA, spec, n_threads=4) as engine:
        before = most = threads()
        async with aclosing(engine.generate(jobs.make("Tell a story.", 4, ignore_eos=True))) as running:
            async for _piece in running:
                most = max(most, threads())
        assert most >= before + 2, "three came, and an idle one may have gone"
        async with asyncio.timeout(30):
            while threads() > before:  # noqa: ASYNC110 - nobody is told when a thread has ended
                await asyncio.sleep(0.01)


async def test_many_jobs_come_and_go_at_random_moments(engine: Engine, jobs: Jobs):
    async def one(number: int) -> int:
        taken = 0
        async with aclosing(engine.generate(jobs.make(f"Number {number}: tell a story.", 30, ignore_eos=True))) as it:
            async for piece in it:
                taken += len(piece.token_ids)
                if taken > number % 13:
                    break
        return taken

    slots = asyncio.Semaphore(engine.info.slots)

    async def queued(number: int) -> int:
        async with slots:
            return await one(number)

    assert await asyncio.gather(*map(queued, range(40))) == [number % 13 + 1 for number in range(40)]
