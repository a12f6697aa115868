"""Swapping in place as the registry does it, on recorded models of one family; memory is for one of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import EngineSpec
from citadel.errors import LlmUnavailable
from engines.replay import Replay, ReplayEngine
from tests.conftest import Serving, first_event, make_config, serving, write_script


def config(folder: Path, **keys: Any) -> Any:
    models: dict[str, Any] = {}
    for name in ("a", "b"):
        source = write_script(folder / f"{name}.jsonl", [{"pieces": [f"this is {name}"]}])
        models[name] = {"engine": "replay", "source": source, "memory_gb": 1, "replay": {"family": "f"}, **keys}
    return make_config(folder, models, gpu={"ram_limit_gb": 1.5})


async def says(server: Serving, model: str) -> str:
    async with server.chat(model=model) as response:
        body = await response.json()
        assert response.status == 200, body
        return body["choices"][0]["message"]["content"]


def states(server: Serving) -> tuple[str, str]:
    return tuple(server.services.registry.status(model).state for model in "ab")  # type: ignore[return-value]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were loaded, in that order."""
    begun: list[str] = []
    real = Replay.load

    async def load(spec: EngineSpec, progress: Any) -> ReplayEngine:
        begun.append(spec.model)
        return await real(spec, progress)

    monkeypatch.setattr(Replay, "load", staticmethod(load))
    return begun


async def test_models_of_one_family_take_over_each_others_engine(tmp_path: Path, loads: list[str]) -> None:
    async with serving(config(tmp_path)) as server:
        for model in "abab":
            assert await says(server, model) == f"this is {model}"
        assert loads == ["a"]
        assert states(server) == ("stopped", "loaded")
        async with server.session.get(f"{server.url}/metrics") as response:
            metrics = await response.text()
        assert 'citadel_swap_seconds_count{model="b"} 2.0' in metrics
        assert 'citadel_swap_seconds_count{model="a"} 1.0' in metrics
        assert 'citadel_load_seconds_count{model="b"}' not in metrics
        await server.services.registry.considered()
        server.services.registry.check_integrity()


async def test_a_swap_teaches_nothing_of_how_long_a_load_takes(tmp_path: Path) -> None:
    async with serving(config(tmp_path, cold_start_s=77)) as server:
        await says(server, "a")
        await says(server, "b")
        assert server.services.registry.status("b").cold_start_s == 77


async def test_an_answer_under_way_ends_before_the_swap(tmp_path: Path, loads: list[str]) -> None:
    settings = config(tmp_path)
    write_script(tmp_path / "a.jsonl", [{"pieces": ["one ", "two ", "three"], "delay_ms": 50}])
    async with serving(settings) as server:
        async with server.chat(model="a", stream=True) as running:
            await first_event(running)
            asked = asyncio.create_task(says(server, "b"))
            assert "three" in await running.text()
        assert await asked == "this is b"
        assert loads == ["a"]


async def test_while_it_is_swapped_the_old_model_is_stopped_and_the_new_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, real = asyncio.Event(), asyncio.Event(), ReplayEngine.swap_to

    async def held_up(self: ReplayEngine, spec: EngineSpec) -> ReplayEngine:
        begun.set()
        await go_on.wait()
        return await real(self, spec)

    monkeypatch.setattr(ReplayEngine, "swap_to", held_up)
    async with serving(config(tmp_path)) as server:
        await says(server, "a")
        asked = asyncio.create_task(says(server, "b"))
        await begun.wait()
        assert states(server) == ("stopped", "starting")
        back = asyncio.create_task(says(server, "a"))
        go_on.set()
        assert (await asked, await back) == ("this is b", "this is a")


@pytest.mark.parametrize("error", [LlmUnavailable("b", "a mixture"), RuntimeError("a fault")])
async def test_a_swap_that_fails_is_a_load_and_its_engine_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: list[str], error: Exception
) -> None:
    closed: list[ReplayEngine] = []
    tried: list[ReplayEngine] = []
    close = ReplayEngine.close

    async def failing(self: ReplayEngine, _: EngineSpec) -> ReplayEngine:
        tried.append(self)
        raise error

    async def watched(self: ReplayEngine) -> None:
        closed.append(self)
        await close(self)

    monkeypatch.setattr(ReplayEngine, "swap_to", failing)
    monkeypatch.setattr(ReplayEngine, "close", watched)
    async with serving(config(tmp_path)) as server:
        await says(server, "a")
        assert await says(server, "b") == "this is b"
        assert loads == ["a", "b"]
        assert closed == tried
        assert states(server) == ("stopped", "loaded")
        await server.services.registry.considered()
        server.services.registry.check_integrity()


async def test_a_model_that_can_neither_be_swapped_nor_loaded_is_unavailable_and_the_old_one_comes_back(
    tmp_path: Path, loads: list[str]
) -> None:
    async with serving(config(tmp_path)) as server:
        await server.services.registry.prepare("b")
        await says(server, "a")
        (tmp_path / "b.jsonl").write_text("no model\n")
        async with server.chat(model="b") as response:
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "llm-unavailable"
        assert await says(server, "a") == "this is a"
        assert loads == ["a", "b", "a"]


async def test_a_server_that_ends_in_a_swap_closes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    engines: list[ReplayEngine] = []

    async def endless(self: ReplayEngine, _: EngineSpec) -> ReplayEngine:
        engines.append(self)
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ReplayEngine, "swap_to", endless)
    async with serving(config(tmp_path)) as server:
        await says(server, "a")
        server.services.registry.load("b")
        await begun.wait()
    assert [engine.dead for engine in engines] == ["the engine was closed"]
    assert states(server) == ("stopped", "stopped")


async def test_a_server_that_ends_in_the_load_after_a_failed_swap_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, real = asyncio.Event(), Replay.load

    async def failing(*_: Any) -> ReplayEngine:
        raise LlmUnavailable("b", "a mixture")

    async def endless(spec: EngineSpec, progress: Any) -> ReplayEngine:
        if spec.model == "b":
            loading.set()
            await asyncio.Event().wait()
        return await real(spec, progress)

    monkeypatch.setattr(ReplayEngine, "swap_to", failing)
    monkeypatch.setattr(Replay, "load", staticmethod(endless))
    async with serving(config(tmp_path)) as server:
        await says(server, "a")
        server.services.registry.load("b")
        await loading.wait()
        assert states(server) == ("stopped", "starting")
    assert states(server) == ("stopped", "stopped")
