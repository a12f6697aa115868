"""Waiting for a model: what is known at once, comments while it loads, budgets, places in the queue, failed starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script

LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "slow", "pieces": ["a"] * 20, "delay_ms": 10},
    {"pieces": ["ok"]},
]
GB = 10**9


def replay(folder: Path, load_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    source = write_script(folder / "script.jsonl", LINES)
    return {"engine": "replay", "source": source, "replay": {"load_s": load_s}, "memory_gb": 1, **fields}


async def refusal(server: Serving, wait: int | None = None, **fields: Any) -> tuple[int, dict[str, Any], Any]:
    headers = {} if wait is None else {"X-LLM-Wait": str(wait)}
    async with server.chat(headers=headers, **fields) as response:
        assert response.headers["Content-Type"] == "application/json"
        return response.status, (await response.json()).get("error", {}), response.headers


async def until_loaded(server: Serving, model: str) -> None:
    async with server.chat(model=model) as response:
        assert response.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_no_wait_answers_at_once_that_the_model_loads(tmp_path: Path, stream: bool) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=1000, cold_start_s=150)})
    async with serving(config) as server:
        status, error, headers = await refusal(server, 0, stream=stream)
        assert (status, error) == (
            503,
            {
                "message": "Loading m; retry in 150 s",
                "type": "model_loading",
                "code": "model_loading",
                "model": "m",
                "state": "starting",
                "retry_after_s": 150,
            },
        )
        assert (headers["Retry-After"], headers["retry-after-ms"]) == ("150", "55000")
        async with server.session.get(f"{server.url}/v1/models/m") as response:
            entry = await response.json()
        assert (entry["state"], entry["loaded"], entry["status"]) == ("starting", False, {"value": "loading"})


async def test_a_spent_budget_is_answered_so_and_the_load_goes_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=0.5)}, server={"wait_s": 0.05})
    async with serving(config) as server:
        assert (await refusal(server))[1]["code"] == "model_loading"
        async with asyncio.timeout(10):
            while (await refusal(server))[0] != 200:
                await refusal(server, 1)
        server.services.registry.check_integrity()


async def test_a_stream_that_waits_says_so_at_once_and_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=0.5)}, server={"comment_s": 0.1})
    async with serving(config) as server, server.chat(stream=True) as response:
        data, comments = await events_of(response)
        assert set(comments) == {"loading m"}
        assert len(comments) >= 3
        assert data[1]["choices"][0]["delta"] == {"content": "ok"}


async def test_a_stream_on_a_loaded_model_has_no_comments(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, {"m": replay(tmp_path)})) as server:
        await until_loaded(server, "m")
        async with server.chat(stream=True) as response:
            assert (await events_of(response))[1] == []


async def test_a_budget_spent_in_a_stream_is_an_error_event(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=1000)}, server={"wait_stream_s": 0.1})
    async with serving(config) as server, server.chat(stream=True) as response:
        data, _ = await events_of(response)
        assert [event["error"]["code"] for event in data] == ["model_loading"]


async def test_two_cold_calls_load_the_model_once(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=0.2)})
    async with serving(config) as server:
        loads: list[str] = []
        server.services.registry._lifecycle._on_loaded = lambda model, _: loads.append(model)
        await asyncio.gather(*(until_loaded(server, "m") for _ in range(5)))
        assert loads == ["m"]


async def test_the_load_time_is_learnt_and_survives_a_restart(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path, load_s=1.2, cold_start_s=77)})
    for expected in (77, 2):
        async with serving(config) as server:
            async with server.session.get(f"{server.url}/v1/models/m") as response:
                assert (await response.json())["cold_start_s"] == expected
            await until_loaded(server, "m")


def two_models(folder: Path, **gpu: Any) -> Any:
    """Memory for one of the two."""
    models = {"a": replay(folder), "b": replay(folder)}
    return make_config(folder, models, gpu={"ram_limit_gb": 1.5, "min_residency_s": 0, **gpu})


async def test_a_second_model_takes_the_place_of_an_idle_one(tmp_path: Path) -> None:
    async with serving(two_models(tmp_path)) as server:
        for model in ("a", "b", "a"):
            await until_loaded(server, model)
            other = "b" if model == "a" else "a"
            assert server.services.registry.status(model).state == "loaded"
            assert server.services.registry.status(other).state == "stopped"


async def test_a_model_with_a_running_call_is_drained_and_never_cut_off(tmp_path: Path) -> None:
    async with serving(two_models(tmp_path)) as server, server.chat("slow", model="a", stream=True) as running:
        await first_event(running)
        status, error, headers = await refusal(server, 0, model="b")
        assert (status, error) == (
            503,
            {
                "message": "Waiting for the GPU (0 ahead); retry in 60 s",
                "type": "queued",
                "code": "queued",
                "model": "b",
                "position": 0,
                "retry_after_s": 60,
                "reason": "waiting for the GPU: a finishes its requests",
            },
        )
        assert headers["Retry-After"] == "60"
        async with server.chat(model="b", stream=True) as waiting:
            data, comments = await events_of(waiting)
        assert comments[0] == "queued b position 0"
        assert data[1]["choices"][0]["delta"] == {"content": "ok"}
        rest, _ = await events_of(running)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in rest) == "a" * 20


async def test_what_is_left_of_a_load_counts_for_the_one_behind_it(tmp_path: Path) -> None:
    models = {"a": replay(tmp_path, load_s=1000, cold_start_s=1000), "b": replay(tmp_path, cold_start_s=7)}
    async with serving(make_config(tmp_path, models)) as server:
        assert (await refusal(server, 0, model="a"))[1]["code"] == "model_loading"
        _, error, _ = await refusal(server, 0, model="b")
        assert (error["code"], error["position"]) == ("queued", 1)
        assert 900 < error["retry_after_s"] <= 1007


async def test_a_model_in_use_takes_calls_for_its_minimum_residency(tmp_path: Path) -> None:
    config = two_models(tmp_path, min_residency_s=100)
    async with serving(config) as server, server.chat("endless", model="a", stream=True) as running:
        await first_event(running)
        _, error, _ = await refusal(server, 0, model="b")
        assert error["reason"] == "waiting for the GPU: a is in use"
        async with server.chat(model="a") as beside:
            assert beside.status == 200
        running.close()
        await until_loaded(server, "b")


async def test_a_queued_load_nobody_waits_for_any_more_is_dropped(tmp_path: Path) -> None:
    async with serving(two_models(tmp_path)) as server, server.chat("endless", model="a", stream=True) as running:
        await first_event(running)
        registry = server.services.registry
        async with server.chat(model="b", stream=True) as waiting:
            assert await waiting.content.readline() == b": queued b position 0\n"
            waiting.close()
        await until_loaded(server, "a")  # takes calls again: it is no longer drained for b
        running.close()
        assert registry.status("b").state == "stopped"


async def test_a_queued_load_answered_with_503_keeps_its_place(tmp_path: Path) -> None:
    async with serving(two_models(tmp_path)) as server:
        async with server.chat("endless", model="a", stream=True) as running:
            await first_event(running)
            assert (await refusal(server, 0, model="b"))[1]["code"] == "queued"
            running.close()
        async with asyncio.timeout(10):
            while server.services.registry.status("b").state != "loaded":
                await server.services.registry.considered()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_never_fits_is_told_with_both_numbers(tmp_path: Path, stream: bool) -> None:
    models = {"m": replay(tmp_path, memory_gb=3)}
    async with serving(make_config(tmp_path, models, gpu={"ram_limit_gb": 2})) as server:
        status, error, headers = await refusal(server, stream=stream)
        reason = "needs 3.00 GB of RAM, 2.00 GB can be made free"
        assert (status, error) == (
            503,
            {
                "message": f"m cannot load now: {reason}",
                "type": "insufficient_memory",
                "code": "insufficient_memory",
                "model": "m",
                "reason": reason,
            },
        )
        assert headers["Retry-After"] == "60"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_start_backs_off_and_then_is_tried_again(tmp_path: Path, stream: bool) -> None:
    models = {"m": replay(tmp_path, backoff_s=(0.2, 1)) | {"replay": {"load_s": "soon"}}}
    async with serving(make_config(tmp_path, models)) as server:
        for _ in range(2):  # the second is answered from the back-off
            async with server.chat(stream=stream) as response:
                text = await response.text()
                assert "llm-unavailable" in text
                assert "load_s: Input should be a valid number" in text
        status, error, _ = await refusal(server, 0)
        assert (status, error["code"], error["type"]) == (502, "llm-unavailable", "llm-unavailable")
        assert set(error) == {"message", "type", "code", "reason"}
        async with server.session.get(f"{server.url}/v1/models/m") as response:
            entry = await response.json()
        assert (entry["state"], entry["reason"]) == ("unavailable", error["reason"])


async def test_one_failed_start_backs_off_once_however_many_wait(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json\n")
    models = {"m": {"engine": "replay", "source": str(broken), "backoff_s": (0.5, 300)}}
    async with serving(make_config(tmp_path, models)) as server:
        told = await asyncio.gather(*(refusal(server) for _ in range(6)))
        assert {error["code"] for _, error, _ in told} == {"llm-unavailable"}
        write_script(broken, [{"pieces": ["ok"]}])
        async with asyncio.timeout(5):  # the back-off was not doubled by each of the six
            while (await refusal(server))[0] != 200:
                continue


async def test_a_failed_load_does_not_poison_the_next(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    models = {"m": {"engine": "replay", "source": str(path), "backoff_s": (0, 0)}}
    path.write_text("no json\n")
    async with serving(make_config(tmp_path, models)) as server:
        assert (await refusal(server))[1]["code"] == "llm-unavailable"
        write_script(path, [{"pieces": ["ok"]}])
        await until_loaded(server, "m")


async def test_missing_weights_name_what_to_do_and_are_found_when_they_come(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    async with serving(make_config(tmp_path, {"m": {"engine": "replay", "source": str(path)}})) as server:
        status, error, _ = await refusal(server)
        assert (status, error["code"], error["reason"]) == (502, "llm-unavailable", f"there is no {path}")
        write_script(path, [{"pieces": ["ok"]}])
        await until_loaded(server, "m")


async def test_a_hub_model_that_is_not_here_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    models = {"m": {"engine": "replay", "source": "no-such-org/no-such-model"}}
    async with serving(make_config(tmp_path, models)) as server:
        reason = (await refusal(server))[1]["reason"]
        assert "python -m citadel models pull m" in reason


async def test_an_engine_that_dies_ends_its_calls_and_is_loaded_again(tmp_path: Path) -> None:
    dying = write_script(
        tmp_path / "dying.jsonl",
        [
            {"when": "die", "pieces": ["a", "b"], "fail": "die", "after": 1, "delay_ms": 50},
            {"when": "slow", "pieces": ["a"] * 100, "delay_ms": 20},
            {"pieces": ["ok"]},
        ],
    )
    models = {"m": {"engine": "replay", "source": dying}, "other": replay(tmp_path)}
    reason = "the replay script ends the engine here"
    expected = {"message": "m stopped and is restarted; the request ended", "type": "engine_restarted"}
    async with serving(make_config(tmp_path, models)) as server:
        async with (
            server.chat("slow", model="m", stream=True) as beside,
            server.chat("slow", model="other", stream=True) as unaffected,
        ):
            await first_event(beside)
            await first_event(unaffected)
            status, error, _ = await refusal(server, messages=[{"role": "user", "content": "die"}], model="m")
            assert (status, error) == (502, expected | {"code": "engine_restarted", "model": "m", "reason": reason})
            data, _ = await events_of(beside)
            assert data[-1] == {"error": expected | {"code": 502, "model": "m", "reason": reason}}
            data, _ = await events_of(unaffected)
            assert data[-1]["choices"][0]["finish_reason"] == "stop"
        await until_loaded(server, "m")


async def test_a_model_is_preloaded_when_asked(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, {"m": replay(tmp_path, preload=True)})) as server:
        async with asyncio.timeout(10):
            while server.services.registry.status("m").state != "loaded":
                await server.services.registry.considered()


async def test_an_idle_model_is_unloaded_after_its_time(tmp_path: Path) -> None:
    async with serving(make_config(tmp_path, {"m": replay(tmp_path, ttl_s=0.2)})) as server:
        await until_loaded(server, "m")
        async with asyncio.timeout(10):
            while server.services.registry.status("m").state != "stopped":
                await server.services.registry.considered()


async def test_the_list_of_models_never_starts_one(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"a": replay(tmp_path, notes="first"), "org/b": replay(tmp_path, aliases=("c",))})
    async with serving(config) as server:
        async with server.session.get(f"{server.url}/v1/models") as response:
            listed = await response.json()
        assert listed["object"] == "list"
        assert listed["data"][0] == {
            "id": "a",
            "object": "model",
            "created": server.services.started_at,
            "owned_by": "hl1",
            "engine": "replay",
            "mode": None,
            "loaded": False,
            "state": "stopped",
            "context_length": None,
            "cold_start_s": 60,
            "notes": "first",
            "format": None,
            "max_model_len": None,
            "status": {"value": "unloaded"},
        }
        assert [entry["id"] for entry in listed["data"]] == ["a", "org/b"]
        for name in ("org/b", "c"):
            async with server.session.get(f"{server.url}/v1/models/{name}") as response:
                assert (await response.json())["id"] == name
        async with server.session.get(f"{server.url}/v1/models/d") as response:
            assert (response.status, (await response.json())["error"]["available"]) == (404, ["a", "org/b"])
        server.services.registry.check_integrity()
        assert server.services.registry.status("a").state == "stopped"


async def test_the_list_says_which_format_was_recognised(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"m": replay(tmp_path), "named": replay(tmp_path, format="hermes")})
    async with serving(config) as server:
        await until_loaded(server, "m")
        async with server.session.get(f"{server.url}/v1/models") as response:
            assert [entry["format"] for entry in (await response.json())["data"]] == ["plain", "hermes"]
