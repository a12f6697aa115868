"""Loads and closes a hyperqwen engine again and again, and prints what the process holds after each time.

A program of its own: pytest keeps every log record of a test, and with them what vLLM's refer to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
from rigs import all_of, hyperqwen_spec

from citadel.engine import Job, Sampling
from engines.hyperqwen import Hyperqwen


async def swap(number: int) -> None:
    engine = await Hyperqwen.load(hyperqwen_spec(Path()), lambda _fraction: None)
    jobs = (Job(f"{number}-{each}", [each + 1, 2, 3], Sampling(max_tokens=8)) for each in range(4))
    await asyncio.gather(*(all_of(engine, job) for job in jobs))
    await engine.close()


def held() -> dict[str, int]:
    me = psutil.Process()
    return {
        "rss": me.memory_info().rss,
        "files": me.num_fds(),
        "threads": me.num_threads(),
        "children": len(me.children(recursive=True)),
    }


async def main(times: int) -> None:
    for number in range(times):
        await swap(number)
        print(json.dumps(held()), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
