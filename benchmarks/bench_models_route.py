"""How long `GET /v1/models` takes, and how long another model's stream stands still, while models load.

A server of its own is started on models.toml. First it is asked for the list at rest; then while the vLLM model loads
for the first time (which imports vLLM into the server's process) and a llama.cpp model streams beside it.

    python benchmarks/bench_models_route.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parent.parent
LLAMA, VLLM = "smollm2", "smollm2-vllm"
PAUSE_S = 0.01


async def timed_list(session: aiohttp.ClientSession) -> float:
    start = time.perf_counter()
    async with session.get("/v1/models") as response:
        await response.read()
        assert response.status == 200
    return (time.perf_counter() - start) * 1000


async def list_until(session: aiohttp.ClientSession, done: asyncio.Event) -> list[float]:
    times: list[float] = []
    while not done.is_set():
        times.append(await timed_list(session))
        await asyncio.sleep(PAUSE_S)
    return times


def chat(session: aiohttp.ClientSession, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "Tell a long story."}], **fields}
    return session.post("/v1/chat/completions", json=body)


async def stream_gaps(session: aiohttp.ClientSession, done: asyncio.Event) -> list[float]:
    """Milliseconds between the lines of streams that follow each other until `done`."""
    gaps: list[float] = []
    while not done.is_set():
        async with chat(session, LLAMA, stream=True, max_tokens=400, ignore_eos=True) as response:
            last = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now - last) * 1000)
                    last = now
    return gaps


async def measure(url: str, key: str) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}, timeout=timeout) as session:
        async with chat(session, LLAMA, max_tokens=4) as response:
            await response.read()
        at_rest = [await timed_list(session) for _ in range(200)]
        done = asyncio.Event()
        lists = asyncio.create_task(list_until(session, done))
        gaps = asyncio.create_task(stream_gaps(session, done))
        start = time.perf_counter()
        async with chat(session, VLLM, max_tokens=4) as response:
            body = await response.json()
        load_s = time.perf_counter() - start
        done.set()
        assert "choices" in body, body
        return {
            "at_rest_ms": summary(at_rest),
            "while_loading_ms": summary(await lists),
            "stream_gap_while_loading_ms": summary(await gaps),
            "load_to_answer_s": round(load_s, 1),
        }


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "worst": round(ordered[-1], 1),
        "count": len(ordered),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "citadel", "--config", str(ROOT / "models.toml")]
        server = subprocess.Popen(
            [*command, "--port", "0", "--data-dir", folder],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert server.stdout is not None
        said = ""
        while "-d" not in said:
            said += server.stdout.readline()
        url = re.search(r"http://\S+", said)
        key = re.search(r"hlk_\w+", said)
        assert url is not None
        assert key is not None
        try:
            result = asyncio.run(measure(url[0], key[0]))
        finally:
            server.terminate()
            server.wait()
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, values in result.items():
        print(f"{name:<30} {values}")


if __name__ == "__main__":
    main()
