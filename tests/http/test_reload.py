"""SIGHUP reads models.toml again: running answers go on, what changed holds, what cannot change live is said."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.conftest import events_of, first_event, write_script
from tests.process import Process

LINES = [{"when": "slow", "pieces": ["a"] * 100, "delay_ms": 20}, {"pieces": ["ok"]}]
MODEL = '[models.{name}]\nengine = "replay"\nsource = "script.jsonl"\n'


def write_models(folder: Path, *names: str, extra: str = "") -> None:
    text = extra + "".join(MODEL.format(name=name) for name in names)
    (folder / "models.toml").write_text(text, encoding="utf-8")


async def logged(server: Process, event: str, number: int = 1) -> dict[str, Any]:
    """Waits for that line of the event in the server's log."""
    async with asyncio.timeout(20):
        while len(lines := await asyncio.to_thread(logged_lines, server, event)) < number:
            continue
    return lines[number - 1]


def logged_lines(server: Process, event: str) -> list[dict[str, Any]]:
    lines = [line for line in server.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


async def test_models_come_and_go_while_an_answer_goes_on(tmp_path: Path) -> None:
    write_script(tmp_path / "script.jsonl", LINES)
    write_models(tmp_path, "a", "b")
    server = Process(tmp_path)
    said = await asyncio.to_thread(server.announcement)
    headers = {"Authorization": f"Bearer {said.key}"}

    async def models(session: aiohttp.ClientSession) -> list[str]:
        async with session.get("/v1/models") as response:
            return [entry["id"] for entry in (await response.json())["data"]]

    async with aiohttp.ClientSession(said.url, headers=headers) as session:
        body = {"model": "b", "messages": [{"role": "user", "content": "slow"}], "stream": True}
        async with session.post("/v1/chat/completions", json=body) as running:
            await first_event(running)
            write_models(tmp_path, "a", "c", extra="[server]\ncomment_s = 9\n[limits]\ncalls_per_minute = 7\n")
            server.process.send_signal(signal.SIGHUP)
            taken = await logged(server, "models.toml is taken")
            assert taken["needs_restart"] == []
            assert taken["later"] == {"b": "it is unloaded when its calls have ended"}
            assert await models(session) == ["a", "c"]
            data, _ = await events_of(running)
            assert data[-1]["choices"][0]["finish_reason"] == "stop"
        async with session.post("/v1/chat/completions", json={**body, "model": "c"}) as response:
            assert (response.status, response.headers["x-ratelimit-limit-requests"]) == (200, "7")
            await response.read()
        write_models(tmp_path, "a", "c", extra="[server]\nmax_body_bytes = 5\n")
        server.process.send_signal(signal.SIGHUP)
        assert (await logged(server, "models.toml is taken", 2))["needs_restart"] == ["server.max_body_bytes"]
        (tmp_path / "models.toml").write_text("[models.a]\n", encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        refused = await logged(server, "models.toml is not taken")
        assert refused["reason"].endswith("models.a.engine: this key is required")
        assert await models(session) == ["a", "c"]
    assert await asyncio.to_thread(server.stop) == 0


async def test_a_changed_loaded_model_is_as_it_was_until_its_next_load(tmp_path: Path) -> None:
    write_script(tmp_path / "script.jsonl", LINES)
    write_script(tmp_path / "other.jsonl", [{"pieces": ["changed"]}])
    write_models(tmp_path, "a")
    server = Process(tmp_path)
    said = await asyncio.to_thread(server.announcement)
    body = {"messages": [{"role": "user", "content": "hi"}]}

    async def answer(session: aiohttp.ClientSession) -> str:
        async with session.post("/v1/chat/completions", json=body) as response:
            return (await response.json())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(said.url, headers={"Authorization": f"Bearer {said.key}"}) as session:
        assert await answer(session) == "ok"
        text = (tmp_path / "models.toml").read_text(encoding="utf-8").replace("script.jsonl", "other.jsonl")
        (tmp_path / "models.toml").write_text(text, encoding="utf-8")
        server.process.send_signal(signal.SIGHUP)
        assert (await logged(server, "models.toml is taken"))["later"] == {"a": "with its next load"}
        assert await answer(session) == "ok"
        async with session.post("/admin/models/a/unload") as response:
            assert response.status == 202
        async with asyncio.timeout(20):
            while await answer(session) != "changed":  # calls go to the old one until it is unloaded
                continue
    assert await asyncio.to_thread(server.stop) == 0
