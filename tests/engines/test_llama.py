"""What only the llama engine has: its batch, its caches, its guards, its options; on a real model."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp")
from llama_cpp import __version__
from rigs import RIGS, SMOLLM2, Jobs, all_of, has_smollm2, llama_spec, text_of, tokens_of

from citadel.engine import Engine, EngineSpec, Piece, Tokenizer
from citadel.errors import BadRequest, EdgeError, LlmUnavailable
from engines.llama_batch import Limits
from engines.llama_native import Batch, Context
from engines.llama_sampling import Chooser

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real, has_smollm2]

RIG = next(rig for rig in RIGS if rig.name == "llama")
STORY = "Once there lived a fox in a dark forest, and a crow on a tall tree, and they had never met. " * 8
TIE = 0.6
"""Two tokens whose log probabilities are closer may change places when a batch is put together differently."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    assert RIG.adapter, "imported here, where it holds up no event loop"
    return llama_spec(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tokenizer(spec: EngineSpec) -> Tokenizer:
    return RIG.adapter.open_tokenizer(spec)


@pytest.fixture(scope="module")
def jobs(tokenizer: Tokenizer) -> Jobs:
    return Jobs(RIG, tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(spec: EngineSpec) -> AsyncIterator[Engine]:
    async with loaded(spec) as engine:
        yield engine


@asynccontextmanager
async def loaded(spec: EngineSpec, **options: object) -> AsyncIterator[Engine]:
    engine = await RIG.adapter.load(replace(spec, options={**spec.options, **options}), lambda _fraction: None)
    try:
        yield engine
    finally:
        await engine.close()


def assert_same_up_to_ties(alone: Sequence[Piece], other: Sequence[Piece]) -> None:
    """`alone` has logprobs: where the outputs part, the other token was as good as the one taken."""
    entries = [entry for piece in alone for entry in piece.logprobs]
    for entry, token in zip(entries, tokens_of(list(other)), strict=False):
        if entry.token_id != token:
            near = {each.token_id: each.logprob for each in entry.top}
            assert token in near, f"{token} instead of {entry}"
            assert entry.logprob - near[token] < TIE
            return
    assert len(tokens_of(list(alone))) == len(tokens_of(list(other)))


# Jobs together.


async def test_jobs_together_give_what_they_give_alone(engine: Engine, jobs: Jobs):
    questions = [f"Tell me about {thing}." for thing in ("rain", "bread", "ships", "snow")]
    alone = [await all_of(engine, jobs.make(question, 40, logprobs=5)) for question in questions]
    together = await asyncio.gather(*(all_of(engine, jobs.make(question, 40)) for question in questions))
    for one, other in zip(alone, together, strict=True):
        assert_same_up_to_ties(one, other)


async def test_a_running_job_lends_its_beginning_and_the_text_stays_the_same(spec: EngineSpec, jobs: Jobs):
    questions = [f"{STORY} {question}" for question in ("Who lived there?", "Where?", "Go on.", "What is this?")]
    async with loaded(spec) as fresh:
        alone = [await all_of(fresh, jobs.make(question, 24, logprobs=5)) for question in questions]
    async with loaded(spec) as fresh:
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
    async with loaded(spec) as roomy:
        alone = [await all_of(roomy, jobs.make(each, 70, ignore_eos=True, logprobs=5)) for each in questions]
    monkeypatch.setattr("engines.llama_worker.Limits", lambda **limits: Limits(**{**limits, "cells": counted}))
    async with loaded(replace(spec, context_length=200), n_ctx=256) as tight:
        assert tight.info.context_length == 200
        wanted = [jobs.make(each, 70, ignore_eos=True) for each in questions]
        together = await asyncio.gather(*(all_of(tight, job) for job in wanted))
    for one, other in zip(alone, together, strict=True):
        assert len(tokens_of(other)) == 70
        assert_same_up_to_ties(one, other)


async def test_partitioned_memory_gives_the_same_text(spec: EngineSpec, jobs: Jobs):
    questions = [f"Tell me about {thing}." for thing in ("rain", "bread", "ships", "snow")]
    async with loaded(spec) as unified:
        alone = [await all_of(unified, jobs.make(each, 24, logprobs=5)) for each in questions]
    async with loaded(spec, kv_unified=False) as parts:
        together = await asyncio.gather(*(all_of(parts, jobs.make(each, 24)) for each in questions))
    for one, other in zip(alone, together, strict=True):
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


# Choosing tokens.


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
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "multipleOf": 5}},
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
    job = jobs.make("Say yes.", 10, grammar=f'start: "call" {name} "done"')
    pieces = await all_of(engine, job)
    assert text_of(pieces) == f"call{name}done"
    assert tokenizer.encode(name)[0] in tokens_of(pieces)


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


# Files, options, memory.


@pytest.mark.parametrize("size", [4, 5, 23, 1000, 100_000, 2_000_000, 50_000_000])
async def test_a_truncated_file_is_unavailable_and_the_process_lives(spec: EngineSpec, tmp_path: Path, size: int):
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(copy_start, SMOLLM2, cut, size)
    with pytest.raises(LlmUnavailable) as caught:
        await RIG.adapter.load(replace(spec, source=cut), lambda _fraction: None)
    assert "cut" in caught.value.fields["reason"] or "not within the file" in caught.value.fields["reason"]


def copy_start(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as file:
        target.write_bytes(file.read(size))


async def test_garbage_behind_the_magic_is_unavailable(spec: EngineSpec, tmp_path: Path):
    source = tmp_path / "garbage.gguf"
    source.write_bytes(b"GGUF\x03\0\0\0" + bytes(range(256)) * 64)
    with pytest.raises(LlmUnavailable):
        await RIG.adapter.load(replace(spec, source=source), lambda _fraction: None)


async def test_a_cache_larger_than_the_machine_is_refused_before_it_is_made(spec: EngineSpec):
    with pytest.raises(LlmUnavailable, match="out of memory"):
        await RIG.adapter.load(replace(spec, options={"n_ctx": 2_000_000_000}), lambda _fraction: None)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"n_gpu_layer": 1}, "nearest is 'n_gpu_layers'"),
        ({"n_batch": "many"}, "'n_batch' is a whole number"),
        ({"kv_unified": 1}, "'kv_unified' is true or false"),
        ({"type_k": "q9"}, "'type_k' is one of f32"),
        ({"flash_attn": "maybe"}, "'flash_attn' is true, false"),
        ({"tensor_split": 1}, "'tensor_split' is a list"),
    ],
    ids=str,
)
async def test_a_wrong_option_is_named(spec: EngineSpec, option: dict[str, object], reason: str):
    with pytest.raises(LlmUnavailable, match=reason):
        await asyncio.to_thread(RIG.adapter.need, replace(spec, options=option))


async def test_options_reach_llama_cpp(spec: EngineSpec, jobs: Jobs):
    options = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True, "n_ubatch": 64, "use_mmap": False}
    async with loaded(spec, **options) as engine:
        assert "Paris" in text_of(await all_of(engine, jobs.make("What is the capital of France?", 20)))


async def test_need_counts_the_cache_of_all_slots(spec: EngineSpec):
    need = RIG.adapter.need
    small = await asyncio.to_thread(need, replace(spec, options={"n_ctx": 1024}))
    large = await asyncio.to_thread(need, replace(spec, options={"n_ctx": 2048}))
    per_token = 30 * 3 * (64 + 64) * 2
    assert 1024 * per_token <= large.ram - small.ram <= 1.2 * 1024 * per_token
    assert small.ram > SMOLLM2.stat().st_size


async def test_a_folder_that_holds_one_model_is_a_source(spec: EngineSpec, tmp_path: Path):
    (tmp_path / "model.gguf").symlink_to(SMOLLM2)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"other")
    tokenizer = await asyncio.to_thread(RIG.adapter.open_tokenizer, replace(spec, source=tmp_path))
    assert tokenizer.vocabulary_size == 49152
    (tmp_path / "second.gguf").symlink_to(SMOLLM2)
    with pytest.raises(LlmUnavailable, match=r"second\.gguf"):
        await asyncio.to_thread(RIG.adapter.open_tokenizer, replace(spec, source=tmp_path))


async def test_a_missing_part_of_a_split_model_is_named(spec: EngineSpec, tmp_path: Path):
    first = tmp_path / "model-00001-of-00002.gguf"
    first.symlink_to(SMOLLM2)
    with pytest.raises(LlmUnavailable, match=r"model-00002-of-00002\.gguf is missing"):
        await asyncio.to_thread(RIG.adapter.need, replace(spec, source=first))


async def test_the_fingerprint_names_engine_version_and_file(engine: Engine):
    name, version, revision = engine.info.fingerprint.split("-")
    assert (name, version) == ("llama", __version__)
    assert len(bytes.fromhex(revision)) == 4


async def test_a_load_cancelled_in_mid_file_gives_its_memory_back(spec: EngineSpec):
    loop = asyncio.get_running_loop()
    halfway = asyncio.Event()

    def progress(fraction: float) -> None:
        if fraction > 0.3:
            loop.call_soon_threadsafe(halfway.set)

    before = memory()
    load = asyncio.create_task(RIG.adapter.load(replace(spec, options={"use_mmap": False}), progress))
    await halfway.wait()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert memory() - before < 32 << 20


async def test_an_error_in_the_progress_callback_fails_the_load(spec: EngineSpec):
    def progress(fraction: float) -> None:
        if fraction > 0.3:
            raise ValueError("no more")

    threads = threading.active_count()
    with pytest.raises(LlmUnavailable, match="no more"):
        await RIG.adapter.load(spec, progress)
    assert threading.active_count() == threads


async def test_loading_and_closing_again_and_again_leaves_threads_and_memory_flat(spec: EngineSpec, jobs: Jobs):
    sizes: list[tuple[int, int]] = []
    for _ in range(5):
        async with loaded(spec) as engine:
            await all_of(engine, jobs.make("What is the capital of France?", 4))
        sizes.append((psutil.Process().num_threads(), memory()))
    assert sizes[-1][0] <= sizes[0][0]
    assert sizes[-1][1] - sizes[1][1] < 16 << 20


def memory() -> int:
    return psutil.Process().memory_info().rss


ABANDON = """
import asyncio, pathlib, sys
from citadel.engine import EngineSpec, Job, Sampling
from engines.llama import Llama

async def main():
    spec = EngineSpec("m", pathlib.Path(sys.argv[1]), None, 2, 256, None, pathlib.Path("."), {"n_threads": 1})
    engine = await Llama.load(spec, lambda _: None)
    running = engine.generate(Job("a", [1, 2, 3], Sampling(max_tokens=200, ignore_eos=True)))
    await anext(running)
    sys.stdout.write("ran")

asyncio.run(main())
"""


async def test_a_program_that_forgets_to_close_still_ends():
    command = [sys.executable, "-c", ABANDON, str(SMOLLM2)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ran"), ended.stderr


async def test_llama_cpps_errors_are_logged_as_errors(
    spec: EngineSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(copy_start, SMOLLM2, cut, 50_000_000)
    with caplog.at_level(logging.WARNING, "citadel.llama"), pytest.raises(LlmUnavailable):
        await RIG.adapter.load(replace(spec, source=cut), lambda _fraction: None)
    assert any(record.levelno == logging.ERROR and "not within the file" in record.message for record in caplog.records)
