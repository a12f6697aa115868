"""A call's events as server-sent events. OpenAI's have `data:` and comment lines only: some clients choke on others.

Nothing is sent before the first event, so until then an error still has its own status. After that it is an event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import orjson
import structlog
from aiohttp import HttpVersion11, web

from citadel.errors import CitadelError, Internal
from citadel.http.services import SERVICES
from citadel.messages import CallEvent, Waiting
from citadel.pipeline import Say
from citadel.wire.dialect import Dialect, Sse

log = structlog.get_logger("citadel.http")

MAX_BEHIND_S: Final = 60
MAX_BEHIND_BYTES: Final = 4 * 2**20
"""A reader that is further behind than this is dropped; what its answer made so far is charged."""
_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE: Final = b"data: [DONE]\n\n"


async def send(
    request: web.Request, dialect: Dialect, run: Callable[[Say], Coroutine[Any, Any, None]]
) -> web.StreamResponse:
    """Answer with the events that `run` says. Raises what it raises before the first of them."""
    done = _DONE if dialect.ends_with_done else b""

    async def write(sender: Sender) -> None:
        async def say(event: CallEvent) -> None:
            if data := _lines(dialect, event):
                await sender.write(data)

        with request.app[SERVICES].gate.call():
            # In a task of its own: each piece wakes it through all the calls it stands in, and a handler's are fifteen.
            await asyncio.create_task(run(say))
        if done:
            await sender.write(done)

    return await answer(request, write, lambda error: b"".join(map(_event, dialect.failed(error))) + done)


async def answer(
    request: web.Request,
    write: Callable[[Sender], Coroutine[Any, Any, None]],
    failed: Callable[[CitadelError], bytes],
) -> web.StreamResponse:
    """Answer with what `write` writes. What it raises before is raised; after that the answer ends with `failed`."""
    sender = Sender(request)
    try:
        await write(sender)
    except ConnectionError:
        raise
    except Exception as error:
        if not sender.began:
            raise
        if not isinstance(error, CitadelError):
            log.exception("fault of the server")
            error = Internal()
        if last := failed(error):
            await sender.write(last)
    return sender.ended()


def _lines(dialect: Dialect, event: CallEvent) -> bytes:
    if isinstance(event, Waiting):
        return _event(dialect.pings) if dialect.pings else f": {_comment(event)}\n\n".encode()
    said = dialect.stream(event)
    return said if isinstance(said, bytes) else b"".join(map(_event, said))


def _comment(waiting: Waiting) -> str:
    model = waiting.model.replace("\r", " ").replace("\n", " ")
    match waiting.kind:
        case "loading":
            return f"loading {model}"
        case "queued":
            return f"queued {model} position {waiting.position}"
        case "slot":
            return "waiting for a slot"


def _event(event: Sse) -> bytes:
    name, data = event
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


class _Events(web.StreamResponse):
    """The headers leave with the first chunk, and the `last` chunk with the end: each would be a write of its own."""

    _send_headers_immediately = False
    last = b""

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data + self.last)


class Sender:
    """Writes without waiting for the reader, and drops one that is too far behind: the engine does not wait either.

    What follows the first chunk goes to the transport in chunks of HTTP/1.1, through the server's outbox; through
    aiohttp it costs twice as much.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = _Events(headers=_HEADERS)
        self._outbox = request.app[SERVICES].outbox
        self._transport: asyncio.Transport | None = None
        """Once the headers are written."""
        self._chunked = request.version >= HttpVersion11  # so it is with aiohttp, as long as it is not asked for chunks
        self._now = asyncio.get_running_loop().time
        self._due: list[bytes] = []
        """What is to be written at the end of the event loop's turn."""
        self._written = 0
        self._unread: deque[tuple[int, float]] = deque()
        """How much was written when, of what has not left."""

    @property
    def began(self) -> bool:
        """Whether the answer has a status by now."""
        return self._response.prepared

    def ended(self) -> web.StreamResponse:
        """The answer, with what is still to be written: nothing may follow it."""
        self._response.last = b"".join(self._due)
        self._due.clear()
        return self._response

    async def write(self, data: bytes) -> None:
        """Raises ConnectionError when the reader is gone, or is sent away."""
        transport = self._transport
        if transport is None:
            await self._begin(data)
            return
        if self._unread:
            self._check(transport, len(data))
        if transport.is_closing():
            raise ConnectionResetError("the reader is gone")
        if not self._due:
            self._outbox.add(self)
        self._due.append(data)

    def flush(self) -> None:
        """Write what is due, as one chunk; nothing to a reader that is gone."""
        due, transport = self._due, self._transport
        if due and transport is not None and not transport.is_closing():
            data = b"".join(due)
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
            self._wrote(transport, len(data))
        due.clear()

    async def _begin(self, data: bytes) -> None:
        """The headers, and with them what comes first."""
        await self._response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the reader is gone")
        # A write never waits: a reader for whom it would have to is dropped before.
        transport.set_write_buffer_limits(high=2 * MAX_BEHIND_BYTES)
        await self._response.write(data)
        self._transport = transport
        self._wrote(transport, len(data))

    def _wrote(self, transport: asyncio.Transport, size: int) -> None:
        self._written += size
        if transport.get_write_buffer_size():  # what has left at once, as for a reader that keeps up, needs no time
            self._unread.append((self._written, self._now()))

    def _check(self, transport: asyncio.Transport, more: int) -> None:
        """Drop the reader if with `more` bytes it is too far behind."""
        waiting = transport.get_write_buffer_size()
        while self._unread and self._unread[0][0] <= self._written - waiting:
            self._unread.popleft()
        late = bool(self._unread) and self._now() - self._unread[0][1] > MAX_BEHIND_S
        if late or (waiting and waiting + sum(map(len, self._due)) + more > MAX_BEHIND_BYTES):
            transport.abort()
            raise ConnectionAbortedError("the reader fell too far behind")
