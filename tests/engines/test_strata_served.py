"""A server with a model of strata: planned for the room there is, shown to its owner, refused where no plan exists."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from tiny_moe import write

from citadel.runtime.installed import engine_spec
from engines import adapter
from tests.conftest import make_config, serving


def config(folder: Path, ram_limit_gb: float, **options: Any) -> Any:
    adapter("strata")  # imported here, where it holds up no event loop
    write(folder / "moe.gguf")
    strata = {"n_threads": 1, "n_gpu_layers": 0, "prompt_cache_mb": 0, **options}
    model = {"engine": "strata", "source": "moe.gguf", "context_length": 128, "max_output_tokens": 4, "strata": strata}
    return make_config(folder, {"moe": model}, gpu={"ram_limit_gb": ram_limit_gb})


async def test_the_owner_sees_where_the_weights_are(tmp_path: Path) -> None:
    settings = await asyncio.to_thread(config, tmp_path, 2.0, place={"_exps": "disk"})
    async with serving(settings) as server:
        async with server.session.get(f"{server.url}/admin/models") as response:
            assert (await response.json())["models"][0]["placement"] is None
        async with server.chat("hello") as response:
            assert response.status == 200, await response.text()
        async with server.session.get(f"{server.url}/admin/models") as response:
            placement = (await response.json())["models"][0]["placement"]
    assert placement["planned"] == placement["found"]
    assert placement["planned"]["disk"] > placement["planned"]["ram"] > 0
    assert placement["elsewhere"] == []
    assert placement["tokens_per_s"] > 0


async def test_a_model_that_fits_in_part_is_served_from_the_disk_in_part(tmp_path: Path) -> None:
    settings = await asyncio.to_thread(config, tmp_path, 1.0)
    whole = await asyncio.to_thread(adapter("strata").need, engine_spec("moe", settings, tmp_path / "moe.gguf"))
    short = (whole.ram - 1_000_000) / 0.95 / 1e9  # a twentieth of RAM is left to the system
    async with serving(await asyncio.to_thread(config, tmp_path, short)) as server:
        async with server.chat("hello") as response:
            assert response.status == 200, await response.text()
        placement = server.services.registry.status("moe").placement
    assert placement is not None
    assert placement.planned["disk"] > 0
    assert placement.planned["ram"] > 0


async def test_without_any_plan_it_is_insufficient_memory_with_both_numbers(tmp_path: Path) -> None:
    async with serving(await asyncio.to_thread(config, tmp_path, 0.05)) as server:
        async with server.chat("hello") as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (503, "insufficient_memory")
    assert error["reason"] == "needs 0.07 GB of RAM, 0.05 GB can be made free"
