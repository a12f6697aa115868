"""The server's connections: what is no valid HTTP is answered like any other error; idle ones end."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from citadel.errors import BadHeader, CitadelError, Internal
from citadel.http.middleware import error_response

log = structlog.get_logger("citadel.http")

HEAD_TIMEOUT_S: Final = 60
"""A connection without one whole request head by then is closed."""


def connections(app: web.Application) -> web.AppRunner:
    """Runs `app`; bodies come as they were sent, since `http.body` bounds what they grow to."""
    return _Runner(app, shutdown_timeout=1)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made: Any = await super()._make_server()
        handle: Any = _answering_errors(made.request_handler)
        return _Server(handle, request_factory=made.request_factory, handler_cancellation=True)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        settings: dict[str, Any] = {"access_log": None, "auto_decompress": False}
        return _Connection(self, loop=asyncio.get_running_loop(), **settings)


class _Connection(web.RequestHandler):
    __slots__ = ("_head_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._still_no_head)

    def _still_no_head(self) -> None:
        if self._request_count == 0:
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

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
        response = error_response("", error)
        response.headers["X-Request-Id"] = id_
        response.force_close()
        return response


def _answering_errors(handler: Handler) -> Handler:
    """Around everything of the application: its routing raises before any middleware runs."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPExpectationFailed:
            return error_response(request.path, BadHeader("Expect: nothing but 100-continue is understood"))

    return handle
