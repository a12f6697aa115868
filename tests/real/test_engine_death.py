"""The vLLM engine's process is killed in mid-stream: that stream ends with the contract's event, others go on."""

from __future__ import annotations

import re

import aiohttp
import pytest

from tests.conftest import events_of, first_event
from tests.integrity import drill
from tests.real.conftest import MODELS, RealServer, asking, engines_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_a_killed_engine_ends_its_streams_and_is_loaded_again(
    session: aiohttp.ClientSession, real_server: RealServer
) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for model in MODELS:
        async with session.post("/v1/chat/completions", json=asking("Hi", model=model, max_tokens=4)) as response:
            assert response.status == 200, await response.text()
    long = asking("Write a long story about a lighthouse.", max_tokens=1500, ignore_eos=True, **usage)
    async with (
        drill(session, real_server.url, real_server.pid) as delivered,
        session.post("/v1/chat/completions", json=long | {"model": "smollm2-vllm"}) as victim,
        session.post("/v1/chat/completions", json=long | {"model": "smollm2", "max_tokens": 300}) as unaffected,
    ):
        await first_event(victim)
        await first_event(unaffected)
        (engine,) = engines_of(real_server)
        engine.kill()
        data, _ = await events_of(victim)
        error = data[-1]["error"]
        assert (error["code"], error["type"], error["model"]) == (502, "engine_restarted", "smollm2-vllm")
        assert set(error) == {"message", "type", "code", "model", "reason"}
        delivered.whole(data[-2]["usage"])
        # Asked at once: the engine starts again by itself, and may be there when the other stream has ended.
        hello = asking("Say hello.", model="smollm2-vllm", max_tokens=8, **usage)
        async with session.post("/v1/chat/completions", json=hello) as response:
            data, comments = await events_of(response)
            # The dead engine may still be being closed, or be gone and the load not begun.
            assert re.fullmatch(r"loading smollm2-vllm|queued smollm2-vllm position [01]", comments[0])
            assert data[-2]["choices"][0]["finish_reason"] in ("stop", "length")
            delivered.whole(data[-1]["usage"])
        data, _ = await events_of(unaffected)
        assert data[-2]["choices"][0]["finish_reason"] == "length"
        delivered.whole(data[-1]["usage"])
