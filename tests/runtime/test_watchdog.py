"""The watchdog's verdict, and what becomes of engines that stall, die again and again, or do not close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import Job, Piece
from citadel.runtime import closing, watchdog
from citadel.runtime.watchdog import PREFILL_TOKENS_PER_S, Attention, Watched, verdict
from engines.replay import ReplayEngine
from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script


def watched(*calls: Attention, last_token: float = 0.0, dead: str | None = None) -> Watched:
    return Watched("m", 60.0, last_token, calls, dead)


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (watched(), None),
        (watched(Attention(since=None)), None),
        (watched(Attention(since=950.0)), None),
        (watched(Attention(since=930.0)), "no token for 70 s"),
        (watched(Attention(since=930.0), last_token=990.0), None),
        (watched(Attention(since=999.0), Attention(since=930.0), last_token=935.0), "no token for 65 s"),
        (watched(Attention(since=930.0), Attention(since=None)), "no token for 70 s"),
        (watched(Attention(since=930.0, unread_tokens=20 * PREFILL_TOKENS_PER_S)), None),
        (watched(dead="killed"), "killed"),
    ],
)
def test_an_engine_is_stalled_when_calls_wait_for_it_and_none_gets_a_token(
    picture: Watched, reason: str | None
) -> None:
    assert verdict(picture, now=1000.0) == reason


@pytest.fixture(autouse=True)
def a_watchdog_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(closing, "PATIENCE_S", 0.2)


def config(folder: Path, lines: list[dict[str, Any]], **fields: Any) -> Any:
    source = write_script(folder / "script.jsonl", lines)
    other = write_script(folder / "other.jsonl", [{"pieces": ["a"] * 60, "delay_ms": 10}])
    models = {
        "m": {"engine": "replay", "source": source, "stall_s": 0.2, "memory_gb": 1, **fields},
        "other": {"engine": "replay", "source": other, "memory_gb": 1},
    }
    return make_config(folder, models, gpu={"ram_limit_gb": 2.5})


async def until(server: Serving, model: str, state: str) -> None:
    async with asyncio.timeout(20):
        while server.services.registry.status(model).state != state:
            await server.services.registry.considered()


async def error_of(server: Serving, text: str, **fields: Any) -> dict[str, Any]:
    async with server.chat(text, **fields) as response:
        return (await response.json()).get("error", {"code": None})


STALLS = [{"when": "stall", "pieces": ["a"], "fail": "stall", "after": 1}, {"pieces": ["ok"]}]


async def test_a_stalled_engine_is_restarted_and_other_models_notice_nothing(tmp_path: Path) -> None:
    async with serving(config(tmp_path, STALLS)) as server:
        async with server.chat("x", model="other", stream=True) as beside:
            await first_event(beside)
            async with server.chat("stall", stream=True) as stalled:
                data, _ = await events_of(stalled)
                error = data[-1]["error"]
                assert (error["code"], error["type"], error["model"]) == (502, "engine_restarted", "m")
                assert error["reason"].startswith("no token for")
            rest, _ = await events_of(beside)
            assert rest[-1]["choices"][0]["finish_reason"] == "stop"
        await until(server, "m", "loaded")  # nobody asked for it
        assert (await error_of(server, "hi"))["code"] is None


async def test_a_slow_reader_is_no_stall(tmp_path: Path) -> None:
    script = [{"pieces": ["x" * 100_000] * 30}]
    async with serving(config(tmp_path, script)) as server, server.chat("x", stream=True) as response:
        await first_event(response)
        await asyncio.wait({asyncio.create_task(asyncio.sleep(1))})  # the reader's pause is what is tested
        data, _ = await events_of(response)
        assert data[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_engine_that_dies_again_and_again_backs_off(tmp_path: Path) -> None:
    dies = [{"pieces": ["a"], "fail": "die", "after": 0}]
    async with serving(config(tmp_path, dies, backoff_s=(100, 300))) as server:
        assert (await error_of(server, "x"))["code"] == "engine_restarted"
        await until(server, "m", "loaded")
        assert (await error_of(server, "x"))["code"] == "engine_restarted"
        await until(server, "m", "unavailable")
        error = await error_of(server, "x")
        assert error["code"] == "llm-unavailable"
        assert error["reason"] == "it failed 2 times lately: the replay script ends the engine here"


class StuckEngine(ReplayEngine):
    """A stand-in for an engine whose thread hangs in native code: it does not close until it is let go."""

    let_go: asyncio.Event

    async def close(self) -> None:
        await super().close()
        await self.let_go.wait()

    async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
        async for piece in super().generate(job):
            yield piece


async def test_calls_that_come_while_an_engine_is_closed_that_died_again_do_not_load_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.replay.ReplayEngine", StuckEngine)
    monkeypatch.setattr(closing, "PATIENCE_S", 60)
    StuckEngine.let_go = asyncio.Event()
    StuckEngine.let_go.set()
    dies = [{"pieces": ["a"], "fail": "die", "after": 0}]
    async with serving(config(tmp_path, dies, backoff_s=(100, 300))) as server:
        assert (await error_of(server, "x"))["code"] == "engine_restarted"
        await until(server, "m", "loaded")
        StuckEngine.let_go.clear()
        assert (await error_of(server, "x"))["code"] == "engine_restarted"
        comes = asyncio.create_task(error_of(server, "x"))
        async with asyncio.timeout(20):
            while server.services.registry.status("m").waiting == 0:
                await server.services.registry.considered()
        StuckEngine.let_go.set()
        error = await comes
        assert error["code"] == "llm-unavailable"
        assert error["reason"].startswith("it failed 2 times lately: ")
        server.services.registry.check_integrity()


async def test_an_unload_after_old_failures_is_no_failure(tmp_path: Path) -> None:
    dies = [{"when": "die", "pieces": ["a"], "fail": "die", "after": 0}, {"pieces": ["ok"]}]
    async with serving(config(tmp_path, dies, backoff_s=(0, 0))) as server:
        for _ in range(2):
            assert (await error_of(server, "die"))["code"] == "engine_restarted"
            async with asyncio.timeout(20):
                while (await error_of(server, "hi"))["code"] is not None:
                    continue
        server.services.registry.unload("m")
        await until(server, "m", "stopped")
        assert (await error_of(server, "hi"))["code"] is None


async def test_an_engine_that_does_not_close_is_given_up_and_its_memory_stays_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.replay.ReplayEngine", StuckEngine)
    StuckEngine.let_go = asyncio.Event()
    stuck = config(tmp_path, STALLS)
    tight = stuck.model_copy(update={"gpu": stuck.gpu.model_copy(update={"ram_limit_gb": 1.5})})
    async with serving(tight) as server:
        assert (await error_of(server, "stall"))["code"] == "engine_restarted"
        await until(server, "m", "stopped")
        error = await error_of(server, "hi")
        assert error["code"] == "insufficient_memory"
        assert error["reason"].endswith("1.00 GB are held by a stuck engine of m")
        StuckEngine.let_go.set()
        async with asyncio.timeout(20):
            while (await error_of(server, "hi"))["code"] is not None:
                await server.services.registry.considered()
