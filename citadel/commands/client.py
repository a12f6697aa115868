"""How the commands talk to a running server: where it is, with which key, and what went wrong in one line."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import aiohttp

from citadel.commands.common import FAILED, STOPPED, USAGE_ERROR

_CONNECT_S: Final = 10
_LINE_BYTES: Final = 2**22
"""The longest line of a stream that is read: a snapshot of all models is one."""


NOT_THERE: Final = (aiohttp.ClientError, TimeoutError, json.JSONDecodeError)
"""What is raised where no server of ours answers; `not_there` has the words for it."""


class Refused(Exception):
    """The server answered with an error; the message is its own. `status` as in HTTP, 0 for an error in a stream."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a stream: `data` is JSON, `comment` what the server says while it waits; one of them is None."""

    data: dict[str, Any] | None
    comment: str | None = None


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises Refused, and aiohttp.ClientError when the server is not there."""
        async with self._session.request(method, path, json=body) as response:
            await _check(response)
            return await response.json()

    async def events(self, method: str, path: str, body: dict[str, Any] | None = None) -> AsyncGenerator[Event]:
        """A stream's events until it ends; iterate under `aclosing`. Raises as `call` does, an error event too."""
        async with self._session.request(method, path, json=body) as response:
            await _check(response)
            async for line in response.content:
                text = line.decode(errors="replace").rstrip("\r\n")
                if text.startswith(": "):
                    yield Event(None, text[2:])
                elif text.startswith("data: {"):
                    data = json.loads(text[6:])
                    if isinstance(error := data.get("error"), dict):
                        raise Refused(_message(data, f"an error: {error}"))
                    yield Event(data)


@asynccontextmanager
async def connected(options: argparse.Namespace) -> AsyncGenerator[Client]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    headers = {"Authorization": f"Bearer {options.key}"}
    async with aiohttp.ClientSession(
        options.url, headers=headers, timeout=timeout, read_bufsize=_LINE_BYTES
    ) as session:
        yield Client(session)


def ask(options: argparse.Namespace, work: Callable[[Client], Awaitable[int]], unreachable: int = FAILED) -> int:
    """The exit code of `work`; `unreachable` where the server is not there."""

    async def run() -> int:
        async with connected(options) as client:
            return await work(client)

    if not has_key(options):
        return USAGE_ERROR
    try:
        return asyncio.run(run())
    except Refused as refused:
        print(refused, file=sys.stderr)
        return FAILED
    except NOT_THERE as error:
        print(not_there(options, error), file=sys.stderr)
        return unreachable
    except KeyboardInterrupt:
        return STOPPED


def has_key(options: argparse.Namespace) -> bool:
    if not options.key:
        print("no key: set CITADEL_API_KEY, or give --key", file=sys.stderr)
    return bool(options.key)


def not_there(options: argparse.Namespace, error: BaseException) -> str:
    """What to tell of an aiohttp.ClientError, a timeout, or what no server of ours answers."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"{options.url}: no server answers there ({error.strerror or error}); start it, or give --url"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return f"{options.url}: the server ended the connection"
        case TimeoutError():
            return f"{options.url}: no answer in time"
        case _:
            return f"{options.url}: this is no answer of Citadel; is the URL right? ({type(error).__name__})"


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    try:
        told = await response.json()
    except (aiohttp.ContentTypeError, ValueError):
        told = None
    said = _message(told, f"the server answered {response.status} to {response.method} {response.url.path}")
    raise Refused(said, response.status)


def _message(told: object, otherwise: str) -> str:
    """Of an error in the OpenAI format, or in Citadel's."""
    outer = cast("dict[str, object]", told) if isinstance(told, dict) else {}
    inner = cast("dict[str, object]", outer["error"]) if isinstance(outer.get("error"), dict) else outer
    message = inner.get("message")
    return message if isinstance(message, str) else otherwise
