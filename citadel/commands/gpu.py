"""`citadel gpu -- COMMAND`: runs a media job under a lease of the GPU, from a running server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from citadel.commands.client import Client, Refused, ask
from citadel.commands.common import NO_COMMAND, NO_LEASE, USAGE_ERROR

_FIRST_WAIT_S = 5.0
"""For the answer to the asking itself: long enough for idle models to make room."""


def run(options: argparse.Namespace) -> int:
    """The command's exit code, or one of ours where it could not run to its end."""
    if not options.argv:
        print("no command: python -m citadel gpu -- COMMAND ...", file=sys.stderr)
        return USAGE_ERROR
    return ask(options, lambda client: _run(client, options), unreachable=NO_LEASE)


async def _run(client: Client, options: argparse.Namespace) -> int:
    async with _lease(client, options) as lease:
        if lease is None:
            return NO_LEASE
        try:
            process = await asyncio.create_subprocess_exec(*options.argv)
        except OSError as error:
            print(f"{options.argv[0]}: {error.strerror}", file=sys.stderr)
            return NO_COMMAND
        ended, kept = asyncio.create_task(process.wait()), asyncio.create_task(_keep(client, lease))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, process.send_signal, number)
        await asyncio.wait({ended, kept}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            print("the lease was lost; the command is ended", file=sys.stderr)
            process.terminate()
            await ended
            return NO_LEASE
        kept.cancel()
        code = ended.result()
        return code if code >= 0 else 128 - code


@asynccontextmanager
async def _lease(client: Client, options: argparse.Namespace) -> AsyncGenerator[dict[str, Any] | None]:
    """A granted lease, given back at the end; None if there is none within `--wait`."""
    asked: dict[str, Any] = {"kind": options.kind, "wait_s": max(0.0, min(_FIRST_WAIT_S, options.wait))}
    if options.gpu_memory is not None:
        asked["gpu_memory_gb"] = options.gpu_memory
    lease = await _call(client, "POST", "/v1/gpu/leases", asked)
    if lease is None:
        yield None
        return
    path = f"/v1/gpu/leases/{lease['id']}"
    try:
        deadline = asyncio.get_running_loop().time() + options.wait
        while lease is not None and lease["state"] == "queued" and asyncio.get_running_loop().time() < deadline:
            print(f"waiting for the GPU, {lease['position']} ahead", file=sys.stderr)
            await asyncio.sleep(min(5.0, max(0.1, lease["expires_in_s"] / 3)))
            lease = await _call(client, "GET", path)
        yield lease if lease is not None and lease["state"] == "granted" else None
    finally:
        with suppress(Refused, aiohttp.ClientError):  # it has ended already, or will: nobody renews it
            await client.call("DELETE", path)


async def _keep(client: Client, lease: dict[str, Any]) -> None:
    """Renew until the server says that the lease has ended."""
    loop, left = asyncio.get_running_loop(), lease
    ends = loop.time() + left["expires_in_s"]
    while loop.time() < ends:  # a renewal that the network loses is tried again while the lease lives
        await asyncio.sleep(max(0.1, left["expires_in_s"] / 3))
        try:
            renewed = await _call(client, "POST", f"/v1/gpu/leases/{lease['id']}/renew")
        except aiohttp.ClientError:
            continue
        if renewed is None:
            return
        left, ends = renewed, loop.time() + renewed["expires_in_s"]


async def _call(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
    try:
        return await client.call(method, path, body)
    except Refused as refused:
        print(f"the server refused: {refused}", file=sys.stderr)
        return None
