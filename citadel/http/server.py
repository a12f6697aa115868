"""The server's connections: what is no valid HTTP is answered like any other error; peers that stall are cut off."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import structlog
from aiohttp import StreamReader, hdrs, web
from aiohttp.typedefs import Handler

from citadel.errors import BadHeader, CitadelError, Internal
from citadel.http import stream
from citadel.http.middleware import error_response
from citadel.http.services import SERVICES
from citadel.metrics import Metrics

log = structlog.get_logger("citadel.http")

_END: Final = b"\r\n\r\n"
"""Of a head, and of a body in chunks."""
_ENOUGH_BYTES: Final = 256
"""Of a head, to know its path; longer ones are none of ours."""
HEAD_TIMEOUT_S: Final = 60
"""A head must be whole this long after it began; the first head of a connection begins with the connection."""


def connections(app: web.Application) -> web.AppRunner:
    """Runs `app`; bodies come as they were sent, since `http.body` bounds what they grow to."""
    return _Runner(app, shutdown_timeout=1)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made: Any = await super()._make_server()
        metrics = self.app[SERVICES].metrics
        handle: Any = _answering_errors(made.request_handler, metrics)
        server = _Server(handle, request_factory=made.request_factory, handler_cancellation=True)
        server.metrics = metrics
        return server


class _Server(web.Server):
    metrics: Metrics

    def __call__(self) -> web.RequestHandler:
        settings: dict[str, Any] = {"access_log": None, "auto_decompress": False}
        connection = _Connection(self, loop=asyncio.get_running_loop(), **settings)
        connection.metrics = self.metrics
        return connection


class _Connection(web.RequestHandler):
    """Between two requests it may idle; a head that has begun, and an answer that is sent, have a time each."""

    __slots__ = ("_begun", "_body", "_ended", "_head_timer", "_length", "metrics")
    metrics: Metrics

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._body: StreamReader | None = None
        self._length = 0
        """Of the latest request's body, as its head says it; 0 of one in chunks, too."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._begun = b""
        """The beginning of the latest head, which says where it was for though no request can be made of it."""
        self._ended = b""
        """The last bytes that came."""
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        body_before = self._body_bytes()
        if self._head_timer is None and self._body_is_whole():
            self._begun = b""
        if len(self._begun) < _ENOUGH_BYTES:
            self._begun += data[:_ENOUGH_BYTES]
        super().data_received(data)
        before_these, self._ended = self._ended, (self._ended + data[-len(_END) :])[-len(_END) :]
        if new := self._request_count > before:
            message, self._body = self._messages[-1]
            self._length = _length(message)
            self._forget_head()
        if (new or data) and self._head_timer is None and self._body_is_whole():
            of_body = self._length if new else self._body_bytes() - body_before
            if not _ends_a_request(before_these + data, len(data), of_body, self._length):
                self._expect_head()

    def _body_bytes(self) -> int:
        return 0 if self._body is None else self._body.total_bytes

    def _body_is_whole(self) -> bool:
        return self._body is None or self._body.is_eof()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        arguments = HEAD_TIMEOUT_S, self._still_no_head, self._request_count
        self._head_timer = asyncio.get_running_loop().call_later(*arguments)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _still_no_head(self, requests_before: int) -> None:
        self._head_timer = None
        if self._request_count > requests_before:
            return
        if self._waiter is None:  # it came while an answer is still being made, which goes first
            self._expect_head()
        else:
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of the answer: all that was not sent before, or the last of a stream.

        It is sent when it has left our memory, and a reader that does not let it leave is dropped.
        """
        if self.transport is not None:
            self.transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(stream.MAX_BEHIND_S):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            raise ConnectionAbortedError("the reader fell too far behind") from None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - what was wrong, with the text that was
    ) -> web.StreamResponse:
        """What aiohttp cannot make a request of. Neither answer nor log repeats it: a key could be in there."""
        if isinstance(exc, ConnectionError):  # the client left, which is no fault
            raise exc
        error: CitadelError = Internal() if status >= 500 else BadHeader("The request is no valid HTTP")
        id_ = secrets.token_hex(16)
        log.warning("no valid HTTP", status=status, kind=type(exc).__name__, request_id=id_)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        self.metrics.refused(error)
        response = error_response(_path(self._begun), error)
        response.headers["X-Request-Id"] = id_
        response.force_close()
        return response


def _length(message: Any) -> int:
    """Of a request's body; 0 of one in chunks, and of what is no request."""
    length = getattr(message, "headers", {}).get(hdrs.CONTENT_LENGTH, "0")
    return int(length) if length.isdecimal() else 0


def _ends_a_request(seen: bytes, new: int, of_body: int, length: int) -> bool:
    """Whether nothing of a next head came behind the latest request, which is whole.

    `seen`: the `new` bytes that came now, with the last before them; `of_body` of them are its body's, of `length` in
    all. A body that has the end of a head in the right place may pass for one: whoever sends that gains no more than
    an idle connection, which they may have anyway.
    """
    if not length:
        return seen.endswith(_END)
    return of_body == new or (of_body == length and seen[: max(0, len(seen) - length)].endswith(_END))


def _path(head: bytes) -> str:
    """What the request line asks for; of what is none, anything: it only chooses the format of an error."""
    words = head.partition(b"\r\n")[0].split(b" ")
    return words[1].partition(b"?")[0].decode("ascii", "replace") if len(words) > 1 else ""


def _answering_errors(handler: Handler, metrics: Metrics) -> Handler:
    """Around everything of the application: its routing raises before any middleware runs."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPExpectationFailed:
            error = BadHeader("Expect: nothing but 100-continue is understood")
            metrics.refused(error)
            return error_response(request.path, error)

    return handle
