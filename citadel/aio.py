"""Two pieces of asyncio that the standard library lacks: merging async generators, and ending a task with an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


async def merge(
    generators: Sequence[AsyncGenerator[T, None]], ended: Callable[[int], bool]
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all of them as they come, each with its generator's index. The first error ends it.

    A generator is closed when `ended` says so after one of its items, and all of them are on every way out.
    """
    pending = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(generators)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                if ended(index):
                    await generators[index].aclose()
                else:
                    pending[asyncio.ensure_future(anext(generators[index]))] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for each in generators:
            await each.aclose()


class Cuttable:
    """A block of the current task that others may end: `cut(error)` makes the block raise `error`.

    It is what `asyncio.timeout` does at its deadline, at a moment that somebody chooses and with an error of theirs.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None
        self._cancelling = 0

    def cut(self, error: Exception) -> None:
        """Takes effect at the block's next await; without effect when the block has ended or was cut before."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Cuttable:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._error is None:
            return
        # A cancellation from elsewhere that came as well is not ours to swallow.
        if task.uncancel() <= self._cancelling and (kind is None or kind is asyncio.CancelledError):
            raise self._error from raised
