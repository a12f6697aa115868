"""The vLLM engine's process is killed in mid-stream: that stream ends with the contract's event, others go on."""

from __future__ import annotations

import re

import aiohttp
import psutil
import pytest

from tests.conftest import events_of, first_event
from tests.real.conftest import RealServer, asking

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def engine_process(server: RealServer) -> psutil.Process:
    children = psutil.Process(server.process.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


async def test_a_killed_engine_ends_its_streams_and_is_loaded_again(
    session: aiohttp.ClientSession, real_server: RealServer
) -> None:
    long = asking("Write a long story about a lighthouse.", max_tokens=1500, stream=True, ignore_eos=True)
    async with (
        session.post("/v1/chat/completions", json=long | {"model": "smollm2-vllm"}) as victim,
        session.post("/v1/chat/completions", json=long | {"model": "smollm2", "max_tokens": 300}) as unaffected,
    ):
        await first_event(victim)
        await first_event(unaffected)
        engine_process(real_server).kill()
        data, _ = await events_of(victim)
        error = data[-1]["error"]
        assert (error["code"], error["type"], error["model"]) == (502, "engine_restarted", "smollm2-vllm")
        assert set(error) == {"message", "type", "code", "model", "reason"}
        # Asked at once: the engine starts again by itself, and may be there when the other stream has ended.
        hello = asking("Say hello.", model="smollm2-vllm", max_tokens=8, stream=True)
        async with session.post("/v1/chat/completions", json=hello) as response:
            data, comments = await events_of(response)
            # The dead engine may still be being closed, or be gone and the load not begun.
            assert re.fullmatch(r"loading smollm2-vllm|queued smollm2-vllm position [01]", comments[0])
            assert data[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        data, _ = await events_of(unaffected)
        assert data[-1]["choices"][0]["finish_reason"] == "length"
