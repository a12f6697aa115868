"""Prompts that vLLM may not compute in parts are handed to it by and by."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from engines.hyperqwen_prefill import Prefill


class Held:
    """Prompts that hold room, or wait for it, until they are let go."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill
        self.inside: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def ask(self, tokens: int) -> None:
        self._ends[tokens] = asyncio.Event()
        self._tasks[tokens] = asyncio.create_task(self._hold(tokens))
        await turns()

    async def _hold(self, tokens: int) -> None:
        async with self._prefill.room(tokens):
            self.inside.append(tokens)
            try:
                await self._ends[tokens].wait()
            finally:
                self.inside.remove(tokens)

    async def answer(self, tokens: int) -> None:
        self._ends[tokens].set()
        await self._tasks[tokens]
        await turns()

    async def cancel(self, *some: int) -> None:
        for tokens in some:
            self._tasks[tokens].cancel()
        for tokens in some:
            with suppress(asyncio.CancelledError):
                await self._tasks[tokens]
        await turns()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_what_exceeds_the_bound_waits_for_a_first_output_in_the_order_of_asking():
    held = Held(Prefill(100))
    for tokens in (40, 50, 30, 5):
        await held.ask(tokens)
    assert held.inside == [40, 50]  # 5 would fit, and is not before 30
    await held.answer(40)
    assert held.inside == [50, 30, 5]


async def test_a_prompt_above_the_bound_goes_alone():
    held = Held(Prefill(100))
    for tokens in (10, 500, 20):
        await held.ask(tokens)
    assert held.inside == [10]
    await held.answer(10)
    assert held.inside == [500]
    await held.answer(500)
    assert held.inside == [20]


async def test_who_leaves_while_waiting_or_holding_leaves_no_room_taken():
    held = Held(Prefill(100))
    for tokens in (90, 80, 30, 60):
        await held.ask(tokens)
    await held.cancel(80)
    assert held.inside == [90]
    await held.cancel(90)
    assert held.inside == [30, 60]
    await held.cancel(30, 60)
    await held.ask(100)
    assert held.inside == [100]


async def test_one_that_leaves_as_it_is_given_its_room_gives_it_back():
    held = Held(Prefill(100))
    for tokens in (70, 60, 50):
        await held.ask(tokens)
    await held.cancel(70, 60)  # 60 has room as 70 ends, and is cancelled before it runs
    assert held.inside == [50]
    await held.answer(50)
    await held.ask(99)
    assert held.inside == [99]


async def test_a_failure_gives_the_room_back():
    prefill = Prefill(100)
    with pytest.raises(ValueError, match="refused"):
        async with prefill.room(100):
            raise ValueError("refused")
    held = Held(prefill)
    await held.ask(100)
    assert held.inside == [100]


async def test_without_a_bound_nobody_waits():
    held = Held(Prefill(None))
    for tokens in (10_000, 20_000):
        await held.ask(tokens)
    assert held.inside == [10_000, 20_000]
