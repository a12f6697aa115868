"""What every fault drill ends with: nothing is held, nothing is left, and usage is what was delivered.

The server is looked at from outside: by its status, its usage, and what its process has open. What ends in its own
time (a socket, a thread, an engine's process) is waited for, up to a bound.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import psutil

PATIENCE_S: Final = 60
SPARE_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""The event loop's pool makes threads when it wants them, up to so many, and keeps them."""
SPARE_DESCRIPTORS: Final = 3
"""A connection of the drill's own may be open yet, and the two pipes of a process that was ended until what remembers
it is collected."""


@dataclass(frozen=True)
class Holdings:
    """What a process has open, and what the server in it has counted so far."""

    threads: int
    descriptors: int
    children: int
    calls: int
    tokens: int


@dataclass
class Delivered:
    """By the callers' own count. Of callers that left, bounds are known only: the engine may have been ahead."""

    calls: int = 0
    tokens: int = 0
    more_calls: int = 0
    more_tokens: int = 0

    def whole(self, usage: Mapping[str, Any]) -> None:
        """An answer that came to its end, or to the error that is its end."""
        self.calls += 1
        self.tokens += usage["total_tokens"]

    def cut(self, usage: Mapping[str, Any] | None, more_tokens: int, *, counts: bool = True) -> None:
        """The caller left with `usage` seen, when at most `more_tokens` more could have been made.

        `counts`: it was beyond the load, so that the call counts whatever became of it.
        """
        self.calls += counts
        self.more_calls += not counts
        self.tokens += usage["total_tokens"] if usage else 0
        self.more_tokens += more_tokens


@asynccontextmanager
async def drill(session: aiohttp.ClientSession, url: str, pid: int) -> AsyncGenerator[Delivered]:
    """Around a drill, with the models loaded that are loaded at its end too.

    `session` has the scope `admin` and keeps no connection open; nobody else may call meanwhile.
    """
    process = psutil.Process(pid)
    before = await _holdings(session, url, process)
    delivered = Delivered()
    yield delivered
    await _until_all_right(session, url, process, before, delivered)


async def _until_all_right(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, before: Holdings, delivered: Delivered
) -> None:
    problems = ["the server does not answer"]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while problems:
                problems = await _problems(session, url, process, before, delivered)
    except TimeoutError:
        raise AssertionError("; ".join(problems)) from None


async def _problems(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, before: Holdings, delivered: Delivered
) -> list[str]:
    async with session.get(f"{url}/admin/status") as response:
        status = await response.json()
    found = [f"in the queue: {place}" for place in status["queue"]]
    for model in status["models"]:
        found += [f"{model['id']}: {model[what]} {what}" for what in ("running", "waiting") if model[what]]
        found += [f"{model['id']} is {model['state']}"] if model["state"] == "starting" or model["draining"] else []
    found += [f"{count} calls are open" for count in [status["open_calls"]] if count]
    now = await _holdings(session, url, process)
    allowed = {"threads": SPARE_THREADS, "descriptors": SPARE_DESCRIPTORS, "children": 0}
    for what, more in allowed.items():
        was, is_ = getattr(before, what), getattr(now, what)
        found += [f"{what} were {was} and are {is_}"] if is_ > was + more else []
    for what in ("calls", "tokens"):
        least, counted = getattr(delivered, what), getattr(now, what) - getattr(before, what)
        most = least + getattr(delivered, f"more_{what}")
        found += [] if least <= counted <= most else [f"{counted} {what} are counted, not {least} to {most}"]
    return found


async def _holdings(session: aiohttp.ClientSession, url: str, process: psutil.Process) -> Holdings:
    async with session.get(f"{url}/admin/usage?days=2") as response:
        rows = (await response.json())["usage"]
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    return Holdings(
        process.num_threads(),
        process.num_fds(),
        len(process.children(recursive=True)),
        sum(row["calls"] for row in rows),
        tokens,
    )
