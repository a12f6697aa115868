"""The server is killed under load, as by a power cut or the kernel: nothing is counted twice, and little is lost."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import first_event
from tests.integrity import Delivered, drill
from tests.models.served import SMOLLM2_LLAMA, SMOLLM2_VLLM, models_toml
from tests.real.conftest import asking, engines_of, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LONG, SHORT, MOST = 900, 5, 1000
"""Tokens: of an answer, long and short, and of the longest with its prompt."""
ENGINES = ("llama", "vllm")
MODELS = models_toml(
    {
        "llama": {**SMOLLM2_LLAMA, "slots": 5, "context_length": 1024},
        "vllm": {**SMOLLM2_VLLM, "slots": 8, "context_length": 1024},
    }
)
STREAMS, WORKERS = 12, 4
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def open_stream(stack: AsyncExitStack, session: aiohttp.ClientSession, model: str) -> None:
    """A long stream, that has begun to answer, or to wait for a slot."""
    body = asking("Tell a story.", model=model, max_tokens=LONG, ignore_eos=True, **USAGE)
    stream = await stack.enter_async_context(session.post("/v1/chat/completions", json=body))
    stack.callback(stream.close)
    assert stream.status == 200


async def whole(session: aiohttp.ClientSession, model: str) -> dict[str, int]:
    body = asking("Say hello.", model=model, max_tokens=SHORT, ignore_eos=True)
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]


async def work(session: aiohttp.ClientSession, delivered: Delivered, busy: asyncio.Event) -> None:
    """Short calls, and calls that are left in mid-answer, until the server is gone; `busy` after some of them.

    A call that was answered is surely written down by the time that the next one has its key looked up.
    """
    answered: list[dict[str, int]] = []
    body = asking("Tell a story.", model="vllm", max_tokens=LONG, **USAGE)
    with suppress(aiohttp.ClientError, AssertionError):
        while True:
            answered.append(await whole(session, "vllm"))
            async with session.post("/v1/chat/completions", json=body) as left:
                await first_event(left)
                left.close()
            delivered.cut(None, MOST, counts=False)
            if len(answered) > 1:
                delivered.whole(answered[-2])
                busy.set()
    for _ in range(3):  # the last that was answered, the one left behind it, and the one under way
        delivered.cut(None, MOST, counts=False)


def counted(folder: Path) -> tuple[int, int]:
    """Calls and tokens, as the database has them."""
    usage = sqlite3.connect(folder / "data" / "citadel.db")
    (calls, tokens) = usage.execute("SELECT sum(calls), sum(prompt_tokens + completion_tokens) FROM usage").fetchone()
    usage.close()
    return calls, tokens


async def killed_under_load(folder: Path, delivered: Delivered) -> list[psutil.Process]:
    async with running(folder, MODELS) as (server, session), AsyncExitStack() as stack:
        for model in ENGINES:
            delivered.whole(await whole(session, model))
        engines = engines_of(server)
        for number in range(STREAMS):
            await open_stream(stack, session, ENGINES[number % 2])
            delivered.cut(None, MOST)
        async with asyncio.TaskGroup() as tasks:
            for busy in [asyncio.Event() for _ in range(WORKERS)]:
                tasks.create_task(work(session, delivered, busy))
                await busy.wait()
            server.process.process.kill()
    return engines


async def test_a_server_killed_under_load_counts_nothing_twice_and_goes_on(tmp_path: Path) -> None:
    delivered = Delivered()
    engines = await killed_under_load(tmp_path, delivered)
    for engine in engines:
        await asyncio.to_thread(engine.wait, 30)
    calls, tokens = await asyncio.to_thread(counted, tmp_path)
    assert delivered.calls <= calls <= delivered.calls + delivered.more_calls
    assert delivered.tokens <= tokens <= delivered.tokens + delivered.more_tokens
    async with running(tmp_path, MODELS) as (server, session):
        for model in ENGINES:
            await whole(session, model)
        async with drill(session, server.url, server.pid) as again:
            for model in ENGINES:
                again.whole(await whole(session, model))
    after = await asyncio.to_thread(counted, tmp_path)
    assert after[0] == calls + 2 * len(ENGINES)
    assert after[1] == tokens + 2 * again.tokens
