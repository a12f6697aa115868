"""One model spread over two workers, processes of their own with a core each, as vLLM spreads it over two GPUs."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from rigs import Jobs, Rig, all_of, assert_same_up_to_ties, kill_hyperqwen, loaded, text_of, tokens_of

from citadel.engine import EngineSpec
from tests.models.export import CHECKPOINT

pytestmark = [
    pytest.mark.all,
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def tiny(folder: Path) -> EngineSpec:
    return EngineSpec("tiny", CHECKPOINT, "batch", 4, 512, None, folder)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


RIG = Rig("hyperqwen", tiny, prompt=lambda message: message, kill=kill_hyperqwen)


async def test_two_workers_answer_as_one_does(tmp_path: Path) -> None:
    spec = tiny(tmp_path)
    jobs = Jobs(RIG, await asyncio.to_thread(RIG.adapter.open_tokenizer, spec))

    def job(max_tokens: int = 48):
        return jobs.make("<|im_start|>user\nTell a story.<|im_end|>\n<|im_start|>assistant\n", max_tokens, logprobs=4)

    async with loaded(RIG, spec) as engine:
        alone = await all_of(engine, job())
    assert text_of(alone)
    before = await asyncio.to_thread(shared_memory)
    for how in ("tensor_parallel_size", "pipeline_parallel_size"):
        async with loaded(RIG, spec, **{how: 2}) as engine:
            assert_same_up_to_ties(alone, await all_of(engine, job()))
            assert len(tokens_of(await all_of(engine, jobs.make("Count.", 8, ignore_eos=True)))) == 8
        assert await asyncio.to_thread(shared_memory) <= before, how
