"""Whether calls are taken, and how they are ended when the server goes: the drain."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

from citadel.aio import Cuttable
from citadel.errors import DeviceOffline


class Gate:
    def __init__(self) -> None:
        self.offline = False
        self._calls: set[Cuttable] = set()
        self._left = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    def check(self) -> None:
        if self.offline:
            raise DeviceOffline

    @contextmanager
    def call(self) -> Generator[None]:
        """One call being answered; it may end with DeviceOffline in its midst."""
        self.check()
        cuttable = Cuttable()
        self._calls.add(cuttable)
        try:
            with cuttable:
                yield
        finally:
            self._calls.discard(cuttable)
            self._left.set()

    def begin_drain(self, seconds: float) -> None:
        """A drain that nobody waits for; `open` ends it."""
        self.offline = True
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self.drain(seconds), name="drain")

    def open(self) -> None:
        """Take calls again."""
        self.offline = False
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None

    async def drain(self, seconds: float) -> None:
        """Take no more calls; give the running ones `seconds`, then end them. Returns when none is left."""
        self.offline = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_left()
        for call in list(self._calls):
            call.cut(DeviceOffline())
        await self._all_left()

    async def _all_left(self) -> None:
        while self._calls:
            self._left.clear()
            await self._left.wait()
