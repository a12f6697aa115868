"""Reading a request's body: bounded in size, in time, and in how much is held by all bodies together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Final

from aiohttp import StreamReader, web

from citadel.errors import BadBody, TooLarge
from citadel.http.encoding import ENCODINGS, Decoder

TIMEOUT_S: Final = 60
SHARED_BYTES: Final = 256 * 2**20
FREE_BYTES: Final = 2**20
"""So much of a body needs no share of the bound: small calls never wait behind large or idle uploads."""


class BodyReader:
    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._budget = _ByteBudget(max(SHARED_BYTES, limit_bytes))

    async def read(self, request: web.Request) -> bytes:
        """The body, decompressed. Raises TooLarge as soon as it is known, BadBody when it does not come whole."""
        declared = request.content_length
        if declared is not None and declared > self._limit:
            raise TooLarge(self._limit)
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ENCODINGS:
            raise BadBody(f"Content-Encoding must be one of {', '.join(ENCODINGS)}")
        try:
            async with asyncio.timeout(TIMEOUT_S) as patience:
                return await self._all_of(request.content, Decoder(encoding), patience)
        except TimeoutError:
            raise BadBody(f"The body did not come within {TIMEOUT_S} s") from None
        except (web.RequestPayloadError, ConnectionError, ValueError) as error:
            raise BadBody from error

    async def _all_of(self, content: StreamReader, decoder: Decoder, patience: asyncio.Timeout) -> bytes:
        """The first part is read at once; whatever has more must have its share of the bound for it.

        Waiting for the share is no fault of the caller's, and is not counted; whoever has one has it for no longer
        than a body may take.
        """
        body = bytearray()
        await self._up_to(FREE_BYTES, content, decoder, body)
        if not content.at_eof():
            async with self._budget.take(self._limit, patience):
                await self._up_to(self._limit, content, decoder, body)
            if not content.at_eof():
                raise TooLarge(self._limit)
        decoder.end()
        return bytes(body)

    async def _up_to(self, size: int, content: StreamReader, decoder: Decoder, body: bytearray) -> None:
        """Read until the end, or until there are more than `size` bytes."""
        while len(body) <= size and (chunk := await content.readany()):
            for piece in decoder.feed(chunk):
                body += piece
                if len(body) > self._limit:
                    raise TooLarge(self._limit)
                await asyncio.sleep(0)  # a small chunk may become many pieces; others have their turn between


class _ByteBudget:
    """A semaphore that counts bytes; first come, first served, so that a large body comes to its turn."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int, patience: asyncio.Timeout) -> AsyncGenerator[None]:
        """`patience` stands still until it is taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            if not turn.done():
                await _standing_still(patience, turn)
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += size
            else:
                with suppress(ValueError):  # passed over already, by somebody who gave back in the same moment
                    self._waiting.remove((size, turn))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            size, turn = self._waiting.popleft()
            if turn.cancelled():
                continue
            self._free -= size
            turn.set_result(None)


async def _standing_still(patience: asyncio.Timeout, turn: asyncio.Future[None]) -> None:
    loop, ends = asyncio.get_running_loop(), patience.when()
    assert ends is not None
    left = ends - loop.time()
    patience.reschedule(None)
    await turn
    patience.reschedule(loop.time() + left)
