"""A call's events as server-sent events: `data:` and comment lines only, since some clients choke on others.

Nothing is sent before the first event, so until then an error still has its own status. After that it is an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import orjson
import structlog
from aiohttp import web

from citadel import errors
from citadel.errors import CitadelError, Internal
from citadel.http.gate import Gate
from citadel.messages import CallEvent, Started, Waiting
from citadel.wire.response import Answering, chunks

log = structlog.get_logger("citadel.http")

SLOW_READER_S: Final = 60
_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE: Final = b"data: [DONE]\n\n"


async def send(
    request: web.Request, answering: Answering, events: AsyncGenerator[CallEvent, None], gate: Gate
) -> web.StreamResponse:
    """Answer with `events`. Raises what they raise before the first of them."""
    response = web.StreamResponse(headers=_HEADERS)
    fingerprint = ""
    try:
        with gate.call():
            async for event in events:
                if isinstance(event, Started):
                    fingerprint = event.fingerprint
                if data := _lines(answering, event, fingerprint):
                    await _write(request, response, data)
        await _write(request, response, _DONE)
    except CitadelError as error:
        if not response.prepared:
            raise
        await _write(request, response, _event(errors.openai_body(error, in_stream=True)) + _DONE)
    except ConnectionError:
        raise
    except Exception:
        if not response.prepared:
            raise
        log.exception("fault of the server")
        await _write(request, response, _event(errors.openai_body(Internal(), in_stream=True)) + _DONE)
    return response


def _lines(answering: Answering, event: CallEvent, fingerprint: str) -> bytes:
    if isinstance(event, Waiting):
        return f": {_comment(event)}\n\n".encode()
    return b"".join(_event(chunk) for chunk in chunks(answering, event, fingerprint))


def _comment(waiting: Waiting) -> str:
    model = waiting.model.replace("\r", " ").replace("\n", " ")
    match waiting.kind:
        case "loading":
            return f"loading {model}"
        case "queued":
            return f"queued {model} position {waiting.position}"
        case "slot":
            return "waiting for a slot"


def _event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Send, waiting for a slow reader a bounded time: the engine does not wait, so what is unread piles up."""
    if not response.prepared:
        await response.prepare(request)
    try:
        async with asyncio.timeout(SLOW_READER_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError("the reader fell too far behind") from None
