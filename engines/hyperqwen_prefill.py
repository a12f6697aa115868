"""How much of prompts vLLM is given at once where it may not compute one in parts.

Then it has no cap on a step either: all prompts that wait are computed in one, and nobody has a token before it ends,
neither they nor those that were generating. What the engine's cache has of a prompt is not known here: each counts
whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

TOKENS: Final = 1024
"""For a processor, which computes no more a second in larger steps."""


class Prefill:
    """At most `most` prompt tokens are with the engine and have no output yet; the next ones wait in order."""

    def __init__(self, most: int | None) -> None:
        """None: there is no bound."""
        self._most = most
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room(self, tokens: int) -> AsyncGenerator[None, None]:
        """To be held from handing over a prompt until its first output. One above the bound goes alone."""
        if self._most is None:
            yield
            return
        tokens = min(tokens, self._most)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # cancelled: it never had room
                self._taken -= tokens
            self._admit()

    def _admit(self) -> None:
        assert self._most is not None
        while self._waiting:
            tokens, turn = self._waiting[0]
            if not turn.cancelled():
                if self._taken + tokens > self._most:
                    return
                self._taken += tokens
                turn.set_result(None)
            self._waiting.popleft()
