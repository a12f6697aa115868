"""The llama engine on models whose memory can't be reused like plain attention's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from rigs import LLAMA, Jobs, Rig, all_of, loaded, tokens_of
from tiny_gguf import write_model

from citadel.engine import EngineSpec, Sampling
from citadel.errors import LlmUnavailable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]

BEGINNING = "the quick brown fox jumps over the lazy dog and then sleeps. " * 8


@pytest.fixture(scope="module", params=["gemma3", "mamba"])
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


@pytest.fixture(scope="module")
def spec(rig: Rig, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder: Path = tmp_path_factory.mktemp(architecture)
    write_model(folder / "model.gguf", architecture)
    return replace(rig.spec(folder), source=folder / "model.gguf")


async def test_a_kept_beginning_never_changes_the_output(spec: EngineSpec, jobs: Jobs, architecture: str):
    prompt = jobs.tokens(BEGINNING)

    async def run(engine, tokens: list[int]):
        return await all_of(engine, jobs.of(tokens, Sampling(max_tokens=12, temperature=0, ignore_eos=True)))

    async with loaded(LLAMA, spec) as engine:
        first = await run(engine, [*prompt, 100])
        onward = [*prompt, 100, *tokens_of(first), 77, 78]
        aside = [*prompt, 200]
        continued = await run(engine, onward)
        branched = await run(engine, aside)
        together = await asyncio.gather(*(run(engine, [*prompt, 300 + number]) for number in range(4)))
    assert continued[0].cached_tokens == len(prompt) + 12
    assert branched[0].cached_tokens == (0 if architecture == "mamba" else len(prompt))
    for tokens, output in [
        (onward, continued),
        (aside, branched),
        *(([*prompt, 300 + number], output) for number, output in enumerate(together)),
    ]:
        async with loaded(LLAMA, spec) as fresh:
            assert tokens_of(await run(fresh, tokens)) == tokens_of(output)


async def test_guessing_ahead_is_refused_where_guesses_could_not_be_forgotten(spec: EngineSpec, architecture: str):
    if architecture == "mamba":
        with pytest.raises(LlmUnavailable, match="a mamba model can't be cut back, which 'speculative' needs"):
            async with loaded(LLAMA, spec, speculative="ngram"):
                pass
    else:
        async with loaded(LLAMA, spec, speculative="ngram") as engine:
            assert engine.dead is None
