"""Ten minutes of everything at once: 64 callers, model swaps, callers that leave, slow readers and media jobs.

A server of its own hosts three models of which two fit: the small model of the tests on llama.cpp and on vLLM, and
SmolLM2 on llama.cpp. Every call must end in a whole answer or an error that the contract has for a busy box; memory,
descriptors, threads and processes must not grow from the second quarter of the time to the last.

    python -m benchmarks.soak [--seconds 600] [--streams 64] [--seed 0] [--samples FILE] [--json]

Exits with 1 when a call was lost or something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.models.served import SMOLLM2_LLAMA, TINY_LLAMA, TINY_VLLM, models_toml
from tests.process import Process

ROOT = Path(__file__).parent.parent
BUSY = {"queued", "model_loading"}
"""The errors of a call whose patience ended; nothing is made to fail here, so no other one is in order."""
SAMPLE_S = 2.0
GROWTH = {"rss_mb": 48, "engines_mb": 48, "descriptors": 16, "threads": 8, "processes": 0}
"""How much the highest value of the last quarter may lie above the second quarter's."""
SMALL_CACHE = {"context_length": 1024, "llama": {"n_threads": 1, "prompt_cache_mb": 16}}
"""So that what is kept of conversations, which fills up while a model lives, does not hide what grows for ever."""
MODELS = {
    "tiny": {**TINY_LLAMA, **SMALL_CACHE, "slots": 16, "memory_gb": 1},
    "tiny-vllm": {**TINY_VLLM, "slots": 16, "memory_gb": 2},
    "smollm2": {**SMOLLM2_LLAMA, **SMALL_CACHE, "slots": 16, "memory_gb": 1},
}
GPU = {"ram_limit_gb": 3.5, "min_residency_s": 5}
"""Any two of the models fit."""


@dataclass
class Record:
    """`ended` counts calls by how they ended; `lost` says what should not have happened.

    `tokens`: those that whole answers said they had, prompts included.
    """

    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    tokens: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)
    leases: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Box:
    """`sessions` are the members who call; `owner` has every scope."""

    owner: aiohttp.ClientSession
    sessions: list[aiohttp.ClientSession]
    process: psutil.Process
    ends_at: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends_at


async def caller(box: Box, number: int, dice: random.Random, record: Record) -> None:
    session = box.sessions[number % len(box.sessions)]
    while not box.over:
        body = {
            "model": dice.choices(["tiny", "tiny-vllm", "smollm2"], [5, 3, 2])[0],
            "messages": [{"role": "user", "content": f"Story number {dice.randrange(50)}. " * dice.randrange(1, 12)}],
            "max_tokens": dice.randrange(1, 100),
            "seed": dice.randrange(1000),
        }
        if dice.random() < 0.8:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        manner = dice.choices(["whole", "leaves", "slow"], [80, 14, 6])[0]
        try:
            how = await one_call(session, body, manner, dice, record)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            how = f"lost: {type(error).__name__}: {error}"
        record.ended[how.partition(": ")[0]] += 1
        if how.startswith("lost"):
            record.lost.append(f"{body['model']} {manner} {how}")


async def one_call(
    session: aiohttp.ClientSession, body: dict[str, Any], manner: str, dice: random.Random, record: Record
) -> str:
    leave_after = dice.uniform(0, 3) if manner == "leaves" else None
    try:
        async with asyncio.timeout(leave_after), session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return verdict((await response.json())["error"])
            if body.get("stream"):
                return await read_stream(response, dice.uniform(0.01, 0.1) if manner == "slow" else 0, record)
            whole = await response.json()
            return whole_answer(whole["choices"][0]["finish_reason"], whole["usage"], record)
    except TimeoutError:
        if leave_after is None:
            raise
        return "left"


async def read_stream(response: aiohttp.ClientResponse, pause_s: float, record: Record) -> str:
    """Its last two events are the one with the reason of its end, and the one with the usage."""
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}
    async for line in response.content:
        if line == b"data: [DONE]\n":
            if "error" in last:
                return verdict(last["error"])
            return whole_answer(before["choices"][0]["finish_reason"], last["usage"], record)
        if line.startswith(b"data: "):
            before, last = last, json.loads(line[6:])
        if pause_s:
            await asyncio.sleep(pause_s)
    return "lost: the stream ended without [DONE]"


def whole_answer(finish_reason: str | None, usage: dict[str, int], record: Record) -> str:
    if finish_reason not in ("stop", "length"):
        return f"lost: finish_reason {finish_reason}"
    record.tokens += usage["total_tokens"]
    return "answered"


def verdict(error: dict[str, Any]) -> str:
    kinds = {str(error.get("type")), str(error.get("code"))}
    return f"told to wait: {kinds}" if kinds & BUSY else f"lost: {error}"


async def media_jobs(box: Box, dice: random.Random, record: Record) -> None:
    while not box.over:
        await asyncio.sleep(dice.uniform(10, 30))
        wish = {"kind": "image", "wait_s": 60} | ({"gpu_memory_gb": 0.2} if dice.random() < 0.5 else {})
        async with box.owner.post("/v1/gpu/leases", json=wish) as response:
            lease = await response.json()
        record.leases[lease["state"]] += 1
        if lease["state"] == "granted":
            await asyncio.sleep(dice.uniform(0.5, 3))
        async with box.owner.delete(f"/v1/gpu/leases/{lease['id']}") as response:
            if response.status != 200:
                record.lost.append(f"lease: {response.status} {await response.text()}")


async def owner(box: Box, dice: random.Random) -> None:
    while not box.over:
        await asyncio.sleep(dice.uniform(8, 20))
        model, what = dice.choice(["tiny", "tiny-vllm", "smollm2"]), dice.choice(["load", "unload"])
        async with box.owner.post(f"/admin/models/{model}/{what}") as response:
            await response.read()


async def sampler(box: Box, record: Record) -> None:
    while not box.over:
        record.samples.append(sample(box.process))
        await asyncio.sleep(SAMPLE_S)


def sample(process: psutil.Process) -> dict[str, float]:
    """Of the server's own process; the engines' processes below it are counted, and what they hold together."""
    below = process.children(recursive=True)
    engines = 0
    for child in below:
        with suppress(psutil.NoSuchProcess):  # it ends while we look
            engines += child.memory_info().rss
    return {
        "rss_mb": process.memory_info().rss / 2**20,
        "engines_mb": engines / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(below),
    }


async def member(box: aiohttp.ClientSession, url: str, name: str, scopes: list[str]) -> aiohttp.ClientSession:
    async with box.post("/admin/keys", json={"member": name, "scopes": scopes}) as response:
        key = (await response.json())["key"]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}, connector=connector, timeout=timeout)


async def soak(url: str, key: str, pid: int, seconds: float, streams: int, seed: int) -> Record:
    record, dice = Record(), random.Random(seed)
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as first:
        opened = [await member(first, url, "owner", ["llm", "gpu", "admin"])]
        opened += [await member(first, url, name, ["llm"]) for name in ("ann", "bob")]
    box = Box(opened[0], opened[1:], psutil.Process(pid), time.monotonic() + seconds)
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(caller(box, number, random.Random(dice.random()), record))
            tasks.create_task(media_jobs(box, random.Random(dice.random()), record))
            tasks.create_task(owner(box, random.Random(dice.random())))
            tasks.create_task(sampler(box, record))
        await check_nothing_is_left(box, record)
    finally:
        for session in opened:
            await session.close()
    return record


async def check_nothing_is_left(box: Box, record: Record) -> None:
    """No call, load or job is under way, and usage is what was answered and no more than what was also begun."""
    async with box.owner.get("/admin/status") as response:
        status = await response.json()
    busy = [each["id"] for each in status["models"] if each["running"] or each["waiting"]]
    record.lost += [f"still held at the end: {id_}" for id_ in busy]
    record.lost += [f"still queued at the end: {place}" for place in status["queue"]]
    calls = sum(row["calls"] for row in status["usage"])
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in status["usage"])
    answered, begun = record.ended["answered"], record.ended["answered"] + record.ended["left"]
    if not answered <= calls <= begun or tokens < record.tokens:
        record.lost.append(f"usage: {calls} calls and {tokens} tokens; answered were {answered} and {record.tokens}")


def growth(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """The highest value of the second quarter of the time, and of the last."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[3 * quarter :]
    return {name: (max(each[name] for each in second), max(each[name] for each in last)) for name in GROWTH}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="where to write what was held, every two seconds, as JSON lines")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models.toml").write_text(models_toml(MODELS, gpu=GPU), encoding="utf-8")
        server = Process(folder)
        said = server.announcement()
        assert said.key is not None
        arguments = said.url, said.key, server.process.pid, options.seconds, options.streams, options.seed
        record = asyncio.run(soak(*arguments))
        loads = server.log.read_text(encoding="utf-8").count('"event": "loading"')
        code = server.stop()
    if options.samples is not None:
        options.samples.write_text("".join(json.dumps(each) + "\n" for each in record.samples), encoding="utf-8")
    grown = growth(record.samples)
    over = [name for name, (before, after) in grown.items() if after - before > GROWTH[name]]
    result = {
        "seconds": options.seconds,
        "streams": options.streams,
        "calls": dict(record.ended),
        "lost": dict(Counter(record.lost)),
        "tokens_answered": record.tokens,
        "loads": loads,
        "leases": dict(record.leases),
        "growth": {name: {"second quarter": a, "last quarter": b} for name, (a, b) in grown.items()},
        "exit_code": code,
    }
    print(json.dumps(result, indent=2) if options.json else "\n".join(f"{k:<16} {v}" for k, v in result.items()))
    sys.exit(1 if record.lost or over or code else 0)


if __name__ == "__main__":
    main()
