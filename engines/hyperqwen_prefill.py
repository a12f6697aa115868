"""How much of prompts vLLM is given at once where it may not compute one in parts.

A step must then have room for a whole context, as a rule for 4,096 tokens at the least, and takes as many prompts as
fit; nobody has a token before they are all computed, neither they nor those that were generating. Handed over by and
by, the first ones have their first token sooner, and the others do not stand still as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

TOKENS: Final = 1024
"""For a processor, which computes no more a second in larger steps."""


class Given:
    """Beginnings of the prompts that the engine was given lately: as far as can be told here, its cache has them.

    What it has let go of, and what of an answer it has, is not known. Where more is wanted than it has room for,
    prompts count too little, and steps are as long as they would be without a bound. In whole blocks of `size` tokens,
    and of these the `most` that were last in use.
    """

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        self._most = most
        self._blocks: dict[int, None] = {}

    def blocks(self, prompt: Sequence[int]) -> list[int]:
        """A number for each whole block, which is that of all before it as well."""
        found: list[int] = []
        before = 0
        for end in range(self._size, len(prompt) + 1, self._size):
            before = hash((before, *prompt[end - self._size : end]))
            found.append(before)
        return found

    def left(self, tokens: int, blocks: Sequence[int]) -> int:
        """How many of a prompt's `tokens` are to be computed; of one that is known whole it is the last block."""
        known = next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        return tokens - self._size * min(known, max(0, tokens - 1) // self._size)

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the beginning is wanted most
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`turn` becomes what was taken for the prompt."""

    tokens: int
    blocks: Sequence[int]
    turn: asyncio.Future[int]


class Prefill:
    """At most `most` tokens to compute are with the engine and have no output yet; the next prompts wait in order.

    A job whose grammar is still being compiled has its room meanwhile.
    """

    def __init__(self, most: int | None, given: Given) -> None:
        """None: there is no bound."""
        self._most = most
        self._given = given
        self._taken = 0
        self._waiting: deque[_Waiting] = deque()

    @asynccontextmanager
    async def room(self, prompt: Sequence[int]) -> AsyncGenerator[None, None]:
        """To be held from handing over `prompt` until its first output. One above the bound goes alone."""
        if self._most is None:
            yield
            return
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(len(prompt), self._given.blocks(prompt), turn))
        self._admit(self._most)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # cancelled: it never had room
                self._taken -= turn.result()
            self._admit(self._most)

    def _admit(self, most: int) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not first.turn.cancelled():
                taken = min(most, self._given.left(first.tokens, first.blocks))
                if self._taken + taken > most:
                    return
                self._taken += taken
                self._given.add(first.blocks)
                first.turn.set_result(taken)
            self._waiting.popleft()
