"""Prompts that vLLM may not compute in parts are handed to it by and by."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from engines.hyperqwen_prefill import Given, Prefill

NOTHING = Given(32, 0)
"""What has no cache to speak of."""


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
        async with self._prefill.room([0] * tokens):
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
    held = Held(Prefill(100, NOTHING))
    for tokens in (40, 50, 30, 5):
        await held.ask(tokens)
    assert held.inside == [40, 50]  # 5 would fit, and is not before 30
    await held.answer(40)
    assert held.inside == [50, 30, 5]


async def test_a_prompt_above_the_bound_goes_alone():
    held = Held(Prefill(100, NOTHING))
    for tokens in (10, 500, 20):
        await held.ask(tokens)
    assert held.inside == [10]
    await held.answer(10)
    assert held.inside == [500]
    await held.answer(500)
    assert held.inside == [20]


async def test_who_leaves_while_waiting_or_holding_leaves_no_room_taken():
    held = Held(Prefill(100, NOTHING))
    for tokens in (90, 80, 30, 60):
        await held.ask(tokens)
    await held.cancel(80)
    assert held.inside == [90]
    await held.cancel(90)
    assert held.inside == [30, 60]
    await held.cancel(30, 60)
    await held.ask(100)
    assert held.inside == [100]


async def test_who_leaves_while_waiting_is_in_nobodys_way():
    held = Held(Prefill(100, NOTHING))
    for tokens in (40, 80, 30):
        await held.ask(tokens)
    await held.cancel(80)
    assert held.inside == [40, 30]


async def test_one_that_leaves_as_it_is_given_its_room_gives_it_back():
    held = Held(Prefill(100, NOTHING))
    for tokens in (70, 60, 50):
        await held.ask(tokens)
    await held.cancel(70, 60)  # 60 has room as 70 ends, and is cancelled before it runs
    assert held.inside == [50]
    await held.answer(50)
    await held.ask(99)
    assert held.inside == [99]


async def test_a_failure_gives_the_room_back():
    prefill = Prefill(100, NOTHING)
    with pytest.raises(ValueError, match="refused"):
        async with prefill.room([0] * 100):
            raise ValueError("refused")
    held = Held(prefill)
    await held.ask(100)
    assert held.inside == [100]


async def test_without_a_bound_nobody_waits():
    held = Held(Prefill(None, NOTHING))
    for tokens in (10_000, 20_000):
        await held.ask(tokens)
    assert held.inside == [10_000, 20_000]


# What the engine has been given before.


def left(given: Given, prompt: list[int]) -> int:
    return given.left(len(prompt), given.blocks(prompt))


def test_what_a_prompt_begins_with_in_common_with_earlier_ones_is_not_computed_again():
    given = Given(4, 100)
    given.add(given.blocks([*range(10)]))
    assert left(given, [*range(8), 50, 51, 52]) == 3  # two whole blocks; the third was never whole
    assert left(given, [*range(4), 50, 51, 52, 53, 8, 9]) == 6
    assert left(given, [50, *range(1, 10)]) == 10
    assert left(given, [4, 5, 6, 7, 8]) == 5  # the same tokens in another place
    given.add(given.blocks([*range(4), 50, 51, 52, 53]))
    assert left(given, [*range(4), 50, 51, 52, 53, 8, 9]) == 2


@pytest.mark.parametrize(("tokens", "computed"), [(1, 1), (3, 3), (4, 4), (5, 1), (8, 4), (9, 1)])
def test_of_a_prompt_known_whole_a_token_at_least_is_computed_and_with_it_its_block(tokens: int, computed: int):
    given = Given(4, 100)
    prompt = [*range(tokens)]
    given.add(given.blocks(prompt))
    assert left(given, prompt) == computed


def test_as_much_is_known_as_the_cache_has_blocks_and_of_that_what_was_used_last():
    given = Given(4, 3)
    first, second, third = ([start, *range(7)] for start in (100, 200, 300))
    given.add(given.blocks(first))
    given.add(given.blocks(second))
    assert [left(given, [*prompt, 9]) for prompt in (first, second)] == [5, 1]  # the end of the older one is gone
    given.add(given.blocks(first[:4]))
    given.add(given.blocks(third))
    assert [left(given, [*prompt, 9]) for prompt in (first, second, third)] == [5, 9, 1]


async def test_prompts_that_begin_with_a_known_one_do_not_wait_for_each_other():
    prefill = Prefill(100, Given(32, 100))
    inside: list[int] = []
    end = asyncio.Event()

    async def ask(prompt: list[int]) -> None:
        async with prefill.room(prompt):
            inside.append(prompt[-1])
            await end.wait()

    shared = [7] * 96
    tasks = [asyncio.create_task(ask([*shared, number])) for number in (1, 2, 3)]
    await turns()
    assert inside == [1, 2, 3]  # 97, 1 and 1 to compute
    tasks.append(asyncio.create_task(ask([8] * 32)))
    await turns()
    assert inside == [1, 2, 3]
    end.set()
    await asyncio.gather(*tasks)
    assert inside == [1, 2, 3, 8]


async def test_one_that_left_before_its_turn_made_nothing_known():
    given = Given(32, 100)
    held = Held(Prefill(10, given))
    for tokens in (9, 64):
        await held.ask(tokens)
    await held.cancel(64)
    assert left(given, [0] * 65) == 65
