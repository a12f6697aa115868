"""The llama engine on models whose memory can't be reused like plain attention's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from rigs import LLAMA, STRATA, Jobs, Rig, all_of, loaded, tokens_of
from tiny_gguf import write_model

from citadel.engine import Engine, EngineSpec, Piece, Sampling
from citadel.errors import LlmUnavailable
from engines.llama_batch import BEFORE_END

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]

BEGINNING = "the quick brown fox jumps over the lazy dog and then sleeps. " * 8
CUT = {"gemma3": True, "gemma3, only its window": False, "mamba": False, "lfm2": False}
"""Models by what is special about their memory, and whether that can be cut back to any length."""


@pytest.fixture(scope="module", params=CUT)
def memory(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


@pytest.fixture(scope="module")
def spec(rig: Rig, memory: str, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder: Path = tmp_path_factory.mktemp("model")
    architecture, _, window = memory.partition(",")
    write_model(folder / "model.gguf", architecture)
    spec = rig.spec(folder)
    options = {**spec.options, "swa_full": False} if window else spec.options
    return replace(spec, source=folder / "model.gguf", options=options)


async def run(engine: Engine, jobs: Jobs, tokens: list[int]) -> list[Piece]:
    return await all_of(engine, jobs.of(tokens, Sampling(12, temperature=0, ignore_eos=True, logprobs=5)))


async def assert_as_alone(spec: EngineSpec, jobs: Jobs, asked: list[tuple[list[int], list[Piece]]]) -> None:
    """Each output is what an engine that has computed nothing before makes of the same tokens."""
    for tokens, output in asked:
        async with loaded(LLAMA, spec) as fresh:
            alone = await run(fresh, jobs, tokens)
        for one, other in zip(alone, output, strict=True):
            (expected,), (got,) = one.logprobs, other.logprobs
            nearly = {each.token_id: pytest.approx(each.logprob, abs=0.02) for each in expected.top}
            assert got.logprob == nearly[got.token_id]
            if got.token_id != expected.token_id:
                assert got.logprob == pytest.approx(expected.logprob, abs=0.04), "two that are as likely"
                break


async def test_a_kept_beginning_never_changes_the_output(spec: EngineSpec, jobs: Jobs, memory: str):
    prompt = jobs.tokens(BEGINNING)
    async with loaded(LLAMA, spec) as engine:
        first = await run(engine, jobs, [*prompt, 100])
        onward = [*prompt, 100, *tokens_of(first), 77, 78]
        aside = [*prompt, 200]
        continued = await run(engine, jobs, onward)
        branched = await run(engine, jobs, aside)
        several = [[*prompt, 300 + number] for number in range(2)]
        together = await asyncio.gather(*(run(engine, jobs, tokens) for tokens in several))
    assert continued[0].cached_tokens == len(prompt) + 12
    assert branched[0].cached_tokens == len(prompt) - (0 if CUT[memory] else BEFORE_END - 1)
    await assert_as_alone(spec, jobs, [(onward, continued), (aside, branched), *zip(several, together, strict=True)])


async def test_a_conversation_whose_thoughts_are_left_out_goes_on_from_before_them(
    spec: EngineSpec, jobs: Jobs, memory: str
):
    """As templates of models that think have it: the end of a prompt, and what follows it, is not in the next one."""
    asking = jobs.tokens(BEGINNING)[-5:]
    told = jobs.tokens(BEGINNING)
    asked: list[tuple[list[int], list[Piece]]] = []
    lengths: list[int] = []
    async with loaded(LLAMA, spec) as engine:
        for turn in range(3):
            prompt = [*told, *asking, 99]
            asked.append((prompt, await run(engine, jobs, prompt)))
            lengths.append(len(told))
            told += [500 + turn, *tokens_of(asked[-1][1])[6:], *jobs.tokens("And then?" * 5)]
    for (_, output), before in zip(asked[1:], lengths, strict=False):
        assert before - BEFORE_END < output[0].cached_tokens <= before
    await assert_as_alone(spec, jobs, asked[1:])


async def test_conversations_with_one_beginning_part_at_a_checkpoint(spec: EngineSpec, jobs: Jobs, memory: str):
    """The first to part shows where; from the third one on nothing of the beginning is computed again."""
    told = jobs.tokens(BEGINNING)
    asked: list[tuple[list[int], list[Piece]]] = []
    async with loaded(LLAMA, replace(spec, slots=1)) as engine:
        for number in range(4):
            tokens = [*told, 600 + number, *jobs.tokens(f"{number} of {number}, please. " * 6)]
            asked.append((tokens, await run(engine, jobs, tokens)))
    cached = [output[0].cached_tokens for _, output in asked]
    assert cached[2:] == [len(told)] * 2
    assert cached[1] == (len(told) if CUT[memory] else 0)
    await assert_as_alone(spec, jobs, asked[2:])


async def test_a_conversation_goes_on_from_before_its_end_after_an_unload(
    spec: EngineSpec, jobs: Jobs, memory: str, tmp_path: Path
):
    """A checkpoint is kept with the sequence that it is of. A window that can be cut is not: its copy is of its end."""
    told, spec = jobs.tokens(BEGINNING), replace(spec, data_dir=tmp_path)
    async with loaded(STRATA, spec, session_mb=8) as engine:
        await run(engine, jobs, [*told, 100])
    async with loaded(STRATA, spec, session_mb=8) as engine:
        aside = await run(engine, jobs, [*told, 200])
    assert aside[0].cached_tokens == (0 if CUT[memory] else len(told) - BEFORE_END + 1)
    await assert_as_alone(spec, jobs, [([*told, 200], aside)])


async def test_without_room_for_checkpoints_all_is_computed_again(spec: EngineSpec, jobs: Jobs, memory: str):
    told = jobs.tokens(BEGINNING)
    async with loaded(LLAMA, spec, prompt_cache_mb=0) as engine:
        await run(engine, jobs, [*told, 1, 2, 3])
        again = await run(engine, jobs, [*told, 4, 5, 6])
    assert again[0].cached_tokens == (len(told) if CUT[memory] else 0)
    await assert_as_alone(spec, jobs, [([*told, 4, 5, 6], again)])


async def test_guessing_ahead_is_refused_where_guesses_could_not_be_forgotten(spec: EngineSpec, memory: str):
    if CUT[memory]:
        async with loaded(LLAMA, spec, speculative="ngram") as engine:
            assert engine.dead is None
    else:
        with pytest.raises(LlmUnavailable, match=r"can't be cut back, which 'speculative' needs"):
            async with loaded(LLAMA, spec, speculative="ngram"):
                pass
