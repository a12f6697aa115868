"""Two checkpoints of one architecture on vLLM, memory for one: swapped in place, and loaded where that is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Serving, make_config, serving
from tests.models.checkpoints import make, read_weights, reordered, write_weights

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


# vLLM's client, when its start fails, closes its sockets and leaves their context to the collector.
@pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning")
async def test_models_swap_in_place_and_a_checkpoint_that_was_broken_since_never_answers(tmp_path: Path) -> None:
    folders = {"one": make(tmp_path / "one"), "other": make(tmp_path / "other", reordered)}
    models = {
        name: {"engine": "hyperqwen", "source": str(folder), "slots": 4, "context_length": 512}
        for name, folder in folders.items()
    }
    async with serving(make_config(tmp_path, models, gpu={"ram_limit_gb": 2.5})) as server:
        fresh = {name: await answer(server, name) for name in models}
        assert fresh["one"] != fresh["other"]
        assert await swaps(server) == {}, "the other one was never loaded before, and had to be"
        assert {name: await answer(server, name) for name in models} == fresh
        assert await swaps(server) == {"one": 1, "other": 1}

        assert await answer(server, "one") == fresh["one"]
        weights = read_weights(folders["other"])
        del weights["model.layers.1.self_attn.k_proj.weight"]  # a third of a linear layer, which vLLM would not miss
        write_weights(folders["other"], weights)
        async with server.chat(model="other") as response:
            assert response.status == 502, await response.text()
            error = (await response.json())["error"]
            assert error["code"] == "llm-unavailable"
            assert "do not have all of model.layers.1.self_attn.qkv_proj.weight" in error["reason"]
        assert await answer(server, "one") == fresh["one"]
        assert await swaps(server) == {"one": 2, "other": 1}
        await server.services.registry.considered()
        server.services.registry.check_integrity()


async def answer(server: Serving, model: str) -> Any:
    asked = server.chat("What is there?", model=model, max_tokens=12, temperature=0, logprobs=True, ignore_eos=True)
    async with asked as response:
        body = await response.json()
        assert response.status == 200, body
        return [(each["token"], each["logprob"]) for each in body["choices"][0]["logprobs"]["content"]]


async def swaps(server: Serving) -> dict[str, int]:
    """How often each model took over the other's engine."""
    async with server.session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [line.removeprefix('citadel_swap_seconds_count{model="') for line in lines]
    return {line.partition('"')[0]: int(float(line.split()[1])) for line in counts if line.startswith("o")}
