"""Fault drills on the real engines: a vLLM process that is stopped, and a client that is gone in every phase."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.conftest import events_of, first_event
from tests.integrity import Delivered, drill
from tests.models.served import SMOLLM2_LLAMA, SMOLLM2_VLLM, models_toml
from tests.real.conftest import RealServer, asking, engines_of, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

LONG = 900
MODELS = models_toml(
    {
        "llama": {**SMOLLM2_LLAMA, "slots": 4, "context_length": 1024},
        "vllm": {**SMOLLM2_VLLM, "slots": 8, "context_length": 1024, "stall_s": 5},
    },
    server={"comment_s": 0.2},
)
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 2000}},
            "required": ["text"],
        },
    },
}


def chat(session: aiohttp.ClientSession, *, text: str = "Tell a long story.", **fields: Any) -> Any:
    return session.post("/v1/chat/completions", json=asking(text, **fields))


def streamed(session: aiohttp.ClientSession, model: str, **fields: Any) -> Any:
    """A long stream that says after every piece what it has used."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"max_tokens": LONG, "ignore_eos": True, **fields}
    return chat(session, model=model, stream=True, stream_options=options, **asked)


async def short(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    async with chat(session, model=model, max_tokens=4) as response:
        told = await response.json()
        assert response.status == 200, told
        delivered.whole(told["usage"])


async def state_of(session: aiohttp.ClientSession, model: str) -> str:
    async with session.get("/admin/models") as response:
        return next(entry["state"] for entry in (await response.json())["models"] if entry["id"] == model)


async def line_of(session: aiohttp.ClientSession) -> list[Any]:
    """Who has the GPU or waits for it."""
    async with session.get("/admin/status") as response:
        return (await response.json())["queue"]


async def unloaded(session: aiohttp.ClientSession, model: str) -> None:
    async with session.post(f"/admin/models/{model}/unload") as response:
        assert response.status == 202
    async with asyncio.timeout(60):
        while await state_of(session, model) != "stopped":
            continue


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drilled(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[tuple[RealServer, aiohttp.ClientSession]]:
    """One server for all drills here; no engine outlives it."""
    async with running(tmp_path_factory.mktemp("drills"), MODELS) as (server, session):
        yield server, session
        engines = engines_of(server)
    assert not [engine for engine in engines if engine.is_running()]


async def test_a_stopped_vllm_process_is_found_killed_and_replaced(
    drilled: tuple[RealServer, aiohttp.ClientSession],
) -> None:
    server, session = drilled
    await short(session, "vllm", Delivered())
    async with drill(session, server.url, server.pid) as delivered:
        async with streamed(session, "vllm") as victim:
            await first_event(victim)
            (stopped,) = engines_of(server)
            stopped.send_signal(signal.SIGSTOP)
            data, _ = await events_of(victim)
            error = data[-1]["error"]
            assert (error["code"], error["type"], error["model"]) == (502, "engine_restarted", "vllm")
            assert error["reason"].startswith("no token for")
            delivered.whole(data[-2]["usage"])
        await short(session, "vllm", delivered)
        assert not stopped.is_running()
        (fresh,) = engines_of(server)
        assert fresh.pid != stopped.pid


@pytest.mark.parametrize("model", ["vllm", "llama"])
async def test_a_client_may_leave_in_every_phase(drilled: tuple[RealServer, aiohttp.ClientSession], model: str) -> None:
    server, session = drilled
    await short(session, model, Delivered())
    async with drill(session, server.url, server.pid) as delivered:
        for each in ("llama", "vllm"):
            await unloaded(session, each)
        await leave_the_queue(session, model, delivered)
        await leave_the_load(session, model, delivered)
        await short(session, model, delivered)
        for _ in range(6):
            await leave_the_prompt(session, model, delivered)
            await leave_the_answer(session, model, delivered)
            await leave_a_call(session, model, delivered)
        await leave_the_slots(session, model, delivered)
        await short(session, model, delivered)


async def leave_the_queue(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    """A media job has the GPU; the caller that waits behind it leaves, and so does a second job."""
    async with session.post("/admin/keys", json={"member": "painter", "scopes": ["gpu"]}) as response:
        painter = {"Authorization": f"Bearer {(await response.json())['key']}"}
    async with session.post("/v1/gpu/leases", json={"kind": "image", "wait_s": 60}, headers=painter) as response:
        lease = await response.json()
        assert lease["state"] == "granted"
    async with streamed(session, model) as queued:
        assert await queued.content.readline() == f": queued {model} position 1\n".encode()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.post("/v1/gpu/leases", json={"kind": "image", "wait_s": 60}, headers=painter)
        queued.close()
    delivered.cut(None, 0, counts=False)
    async with asyncio.timeout(60):
        while len(await line_of(session)) > 1:
            continue
    async with session.delete(f"/v1/gpu/leases/{lease['id']}", headers=painter) as response:
        assert response.status == 200
    assert await state_of(session, model) == "stopped"


async def leave_the_load(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    async with streamed(session, model) as loading:
        async for line in loading.content:
            if line == f": loading {model}\n".encode():
                break
        loading.close()
    delivered.cut(None, LONG + 100, counts=False)


async def leave_the_prompt(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    """In the midst of it, or just behind it, as fast as the machine is."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), streamed(session, model, text="word " * 700, max_tokens=200) as prompt:
            await prompt.read()
    delivered.cut(None, 1000, counts=False)


async def leave_the_answer(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    async with streamed(session, model) as answer:
        delivered.cut((await first_event(answer))["usage"], LONG)
        answer.close()


async def leave_a_call(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    """In the midst of the arguments of a tool call."""
    async with streamed(session, model, tools=[WRITE], tool_choice="required", ignore_eos=False) as calling:
        async for line in calling.content:
            event = json.loads(line[6:]) if line.startswith(b"data: ") else {"choices": []}
            fragments = [each for choice in event["choices"] for each in choice["delta"].get("tool_calls", ())]
            if any("id" not in each and each["function"]["arguments"] for each in fragments):
                break
        else:
            raise AssertionError("there was no call")
        delivered.cut(event["usage"], LONG)
        calling.close()


async def leave_the_slots(session: aiohttp.ClientSession, model: str, delivered: Delivered) -> None:
    """More streams than slots: some have a slot, some wait for one."""
    streams = [await streamed(session, model) for _ in range(10)]
    for stream in streams:
        stream.close()
        delivered.cut(None, LONG + 100, counts=False)
