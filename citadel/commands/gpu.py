"""`citadel gpu -- COMMAND`: runs a media job under a lease of the GPU, from a running server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

_LOST: Final = 75
"""What the exit code says when there was no lease to be had (EX_TEMPFAIL): try again later."""


_NO_COMMAND: Final = 127


def run(options: argparse.Namespace) -> int:
    """The command's exit code; 75 if the server gives no lease, or takes it away."""
    if not options.key:
        print("no key: set CITADEL_API_KEY, or give --key", file=sys.stderr)
        return 2
    if not options.argv:
        print("no command: python -m citadel gpu -- COMMAND ...", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_run(options))
    except aiohttp.ClientError as error:
        print(f"{options.url}: {error}", file=sys.stderr)
        return _LOST


async def _run(options: argparse.Namespace) -> int:
    headers = {"Authorization": f"Bearer {options.key}"}
    async with aiohttp.ClientSession(options.url, headers=headers) as session, _lease(session, options) as lease:
        if lease is None:
            return _LOST
        try:
            process = await asyncio.create_subprocess_exec(*options.argv)
        except OSError as error:
            print(f"{options.argv[0]}: {error.strerror}", file=sys.stderr)
            return _NO_COMMAND
        ended, kept = asyncio.create_task(process.wait()), asyncio.create_task(_keep(session, lease))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, process.send_signal, number)
        await asyncio.wait({ended, kept}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            print("the lease was lost; the command is ended", file=sys.stderr)
            process.terminate()
            await ended
            return _LOST
        kept.cancel()
        code = ended.result()
        return code if code >= 0 else 128 - code


@asynccontextmanager
async def _lease(session: aiohttp.ClientSession, options: argparse.Namespace) -> AsyncGenerator[dict[str, Any] | None]:
    """A granted lease, given back at the end; None if there is none within `--wait`."""
    asked: dict[str, Any] = {"kind": options.kind}
    if options.gpu_memory is not None:
        asked["gpu_memory_gb"] = options.gpu_memory
    lease = await _call(session, "POST", "/v1/gpu/leases", asked)
    if lease is None:
        yield None
        return
    path = f"/v1/gpu/leases/{lease['id']}"
    try:
        deadline = asyncio.get_running_loop().time() + options.wait
        while lease is not None and lease["state"] == "queued" and asyncio.get_running_loop().time() < deadline:
            print(f"waiting for the GPU, {lease['position']} ahead", file=sys.stderr)
            await asyncio.sleep(min(5.0, max(0.1, lease["expires_in_s"] / 3)))
            lease = await _call(session, "GET", path)
        yield lease if lease is not None and lease["state"] == "granted" else None
    finally:
        async with session.delete(path):
            pass


async def _keep(session: aiohttp.ClientSession, lease: dict[str, Any]) -> None:
    """Renew until the server says that the lease has ended."""
    loop, left = asyncio.get_running_loop(), lease
    ends = loop.time() + left["expires_in_s"]
    while loop.time() < ends:  # a renewal that the network loses is tried again while the lease lives
        await asyncio.sleep(max(0.1, left["expires_in_s"] / 3))
        try:
            renewed = await _call(session, "POST", f"/v1/gpu/leases/{lease['id']}/renew")
        except aiohttp.ClientError:
            continue
        if renewed is None:
            return
        left, ends = renewed, loop.time() + renewed["expires_in_s"]


async def _call(
    session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    async with session.request(method, path, json=body) as response:
        told = await response.json()
        if response.status != 200:
            print(f"the server refused: {told.get('message', response.status)}", file=sys.stderr)
            return None
        return told
