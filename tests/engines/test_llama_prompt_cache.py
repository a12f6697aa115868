"""More conversations than slots: those that lost their place come back from RAM, and answer as without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from rigs import LLAMA, Jobs, Rig, all_of, loaded, tokens_of
from tiny_gguf import write_model

from citadel.engine import Engine, EngineSpec, Piece, Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]

TINY = Path(__file__).parent.parent / "models" / "tiny.gguf"
SLOTS, STORIES = 2, 5
TURN = 8


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


@pytest.fixture(scope="module", params=["qwen3", "gemma3", "mamba", "lfm2"])
def spec(rig: Rig, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder: Path = tmp_path_factory.mktemp(request.param)
    source = TINY if request.param == "qwen3" else folder / "model.gguf"
    if source != TINY:
        write_model(source, request.param)
    return replace(rig.spec(folder), slots=SLOTS, source=source)


async def conversations(engine: Engine, jobs: Jobs) -> tuple[list[list[int]], list[int]]:
    """Two turns of five conversations, in turn: every output, and what each second turn did not compute again."""
    sampling = Sampling(max_tokens=TURN, temperature=0, ignore_eos=True)
    told = [jobs.tokens(f"Story {number}: " + f"{number} little birds sang. " * 20) for number in range(STORIES)]
    outputs: list[list[int]] = []
    cached: list[int] = []
    for turn in range(2):
        for tokens in told:
            pieces: list[Piece] = await all_of(engine, jobs.of(list(tokens), sampling))
            outputs.append(tokens_of(pieces))
            tokens += [*outputs[-1], 77, 78]
            if turn == 1:
                cached.append(pieces[0].cached_tokens)
    return outputs, cached


async def test_a_conversation_that_lost_its_slot_goes_on_as_if_it_had_kept_it(spec: EngineSpec, jobs: Jobs):
    async with loaded(LLAMA, spec, prompt_cache_mb=64) as engine:
        restored, cached = await conversations(engine, jobs)
    async with loaded(LLAMA, replace(spec, slots=STORIES), prompt_cache_mb=0) as engine:
        kept, cached_by_slots = await conversations(engine, jobs)
    async with loaded(LLAMA, spec, prompt_cache_mb=0) as engine:
        _, cached_by_few = await conversations(engine, jobs)
    assert restored == kept
    assert cached == cached_by_slots
    assert all(tokens > 100 for tokens in cached)
    assert sum(tokens > 100 for tokens in cached_by_few) <= SLOTS
