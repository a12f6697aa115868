"""The drain: the socket stays open, new calls are told, running ones get their time and then an error event."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp

from tests.conftest import events_of, first_event, make_config, serving, write_script
from tests.process import ROOT, Process

OFFLINE = {
    "message": "The language model service is offline",
    "type": "service_unavailable",
    "code": "device_offline",
}
LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "slow", "pieces": ["a"] * 20, "delay_ms": 20},
    {"pieces": ["ok"]},
]


async def test_a_drain_lets_short_calls_end_and_cuts_long_ones(tmp_path: Path) -> None:
    models = {"m": {"engine": "replay", "source": write_script(tmp_path / "script.jsonl", LINES)}}
    async with serving(make_config(tmp_path, models)) as server:
        async with server.chat("endless", stream=True) as long, server.chat("slow", stream=True) as short:
            await first_event(long)
            await first_event(short)
            drain = asyncio.create_task(server.services.gate.drain(2))
            async with asyncio.timeout(5):
                while not server.services.gate.offline:
                    await asyncio.wait({drain}, timeout=0)
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
                async with server.session.request(method, server.url + path) as response:
                    assert (response.status, await response.json()) == (503, {"error": OFFLINE})
                    assert (response.headers["Retry-After"], response.headers["retry-after-ms"]) == ("60", "55000")
            async with server.session.get(server.url + "/readyz") as response:
                assert (response.status, (await response.json())["code"]) == (503, "unavailable")
            async with server.session.get(server.url + "/healthz") as response:
                assert response.status == 200
            data, _ = await events_of(short)
            assert data[-1]["choices"][0]["finish_reason"] == "stop"
            data, _ = await events_of(long)
            assert data[-1] == {"error": OFFLINE}
            await drain
        server.services.registry.check_integrity()


async def test_a_call_that_waits_for_a_load_is_cut_too(tmp_path: Path) -> None:
    source = write_script(tmp_path / "script.jsonl", LINES)
    models = {"m": {"engine": "replay", "source": source, "replay": {"load_s": 1000}}}
    async with serving(make_config(tmp_path, models)) as server, server.chat(stream=True) as waiting:
        assert await waiting.content.readline() == b": loading m\n"
        await server.services.gate.drain(0)
        data, _ = await events_of(waiting)
        assert data == [{"error": OFFLINE}]


def folder_with_models(folder: Path, load_s: float = 0) -> Path:
    write_script(folder / "script.jsonl", LINES)
    table = '[server]\ndrain_s = 0.5\n[models.m]\nengine = "replay"\nsource = "script.jsonl"\n'
    table += f"[models.m.replay]\nload_s = {load_s}\n"
    (folder / "models.toml").write_text(table, encoding="utf-8")
    return folder


async def test_sigterm_ends_a_stream_with_an_event_and_the_process_with_0(tmp_path: Path) -> None:
    server = Process(folder_with_models(tmp_path))
    said = await asyncio.to_thread(server.announcement)
    headers = {"Authorization": f"Bearer {said.key}"}
    body = {"messages": [{"role": "user", "content": "endless"}], "stream": True}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{said.url}/v1/chat/completions", json=body) as response:
            await first_event(response)
            server.process.send_signal(signal.SIGTERM)
            data, _ = await events_of(response)
            assert data[-1] == {"error": OFFLINE}
    assert await asyncio.to_thread(server.wait) == 0
    assert "Traceback" not in server.log.read_text(encoding="utf-8")


async def test_later_starts_print_the_command_for_a_key_and_no_key_and_a_call_that_works_as_printed(
    tmp_path: Path,
) -> None:
    folder_with_models(tmp_path)
    environment = dict(os.environ)
    for first in (True, False):
        server = Process(tmp_path)
        said = await asyncio.to_thread(server.announcement)
        assert (said.key is not None) is first
        environment["CITADEL_API_KEY"] = said.key or environment["CITADEL_API_KEY"]
        tried = "\n".join(server.lines[server.lines.index("Try:") + 1 :])
        done = await asyncio.to_thread(
            subprocess.run, ["sh", "-c", tried], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "ok"
        command = f"python -m citadel keys create --member NAME --scope llm --data-dir {tmp_path / 'data'}"
        assert any(command in line for line in server.lines) is not first
        assert await asyncio.to_thread(server.stop) == 0


async def test_a_second_server_on_the_same_data_directory_refuses_to_start(tmp_path: Path) -> None:
    first = Process(folder_with_models(tmp_path))
    await asyncio.to_thread(first.announcement)
    second = Process(tmp_path)
    assert await asyncio.to_thread(second.wait) == 1
    last = second.log.read_text(encoding="utf-8").splitlines()[-1]
    assert last == f"another server is running on the data directory {tmp_path / 'data'}"
    assert await asyncio.to_thread(first.stop) == 0


async def test_a_port_that_is_taken_is_told_in_one_line(tmp_path: Path) -> None:
    first = Process(folder_with_models(tmp_path))
    port = (await asyncio.to_thread(first.announcement)).url.rpartition(":")[2]
    second = Process(tmp_path, "--port", port, "--data-dir", str(tmp_path / "other"))
    assert await asyncio.to_thread(second.wait) == 1
    last = second.log.read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith(f"cannot listen on 127.0.0.1:{port}:")
    await asyncio.to_thread(first.stop)


async def test_a_model_still_loading_does_not_hold_up_the_end(tmp_path: Path) -> None:
    server = Process(folder_with_models(tmp_path, load_s=1000))
    said = await asyncio.to_thread(server.announcement)
    headers = {"Authorization": f"Bearer {said.key}", "X-LLM-Wait": "0"}
    async with aiohttp.ClientSession(headers=headers) as session:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with session.post(f"{said.url}/v1/chat/completions", json=body) as response:
            assert (await response.json())["error"]["code"] == "model_loading"
    assert await asyncio.to_thread(server.stop) == 0


def test_keys_are_made_listed_and_revoked_from_the_command_line(tmp_path: Path) -> None:
    def citadel(*arguments: str) -> str:
        command = [sys.executable, "-m", "citadel", *arguments, "--data-dir", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    key = citadel("keys", "create", "--member", "ann", "--scope", "llm", "--scope", "gpu").splitlines()[-1]
    id_ = key.split("_")[1]
    listed = citadel("keys", "list")
    assert id_ in listed
    assert "ann" in listed
    assert key.split("_")[2] not in listed
    citadel("keys", "revoke", id_)
    (row,) = json.loads(citadel("keys", "list", "--json"))
    assert (row["id"], row["member"], row["scopes"]) == (id_, "ann", ["gpu", "llm"])
    assert row["revoked_at"] is not None
    limited = citadel("keys", "create", "--member", "bob", "--scope", "llm", "--daily-calls", "3", "--model", "m")
    successor = citadel("keys", "rotate", limited.splitlines()[-1].split("_")[1]).splitlines()[-1]
    rows = {row["id"]: row for row in json.loads(citadel("keys", "list", "--json"))}
    assert (rows[successor.split("_")[1]]["daily_calls"], rows[successor.split("_")[1]]["models"]) == (3, ["m"])
    (bob,) = json.loads(citadel("members", "set", "bob", "--daily-tokens", "100", "--json"))
    assert bob == {"member": "bob", "daily_tokens": 100, "open_per_member": None, "max_parallel": None}
    assert json.loads(citadel("usage", "--json")) == []
