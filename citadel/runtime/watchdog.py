"""Looks for engines that died or make no tokens any more, and reports them; the registry acts.

A model is stalled when a call has waited for its engine longer than `stall_s`, and no call on the model got a token in
that time. Prompts still being read earn more time. A caller that is slow to read does not count: nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

PREFILL_TOKENS_PER_S: Final = 50
"""What the slowest box that is worth serving on reads of a prompt."""
LOOK_EVERY_S: Final = 1.0


@dataclass(slots=True)
class Attention:
    """One running call's side of the watch; times on the monotonic clock.

    `since`: when it began to wait for the engine; None while it does not. `unread_tokens` of its prompt until its
    first token.
    """

    since: float | None = None
    unread_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """A loaded model: `last_token` of any call on it, ever."""

    model: str
    stall_s: float
    last_token: float
    calls: tuple[Attention, ...]
    dead: str | None


def verdict(watched: Watched, now: float) -> str | None:
    """Why the engine is to be restarted; None if it is not."""
    if watched.dead is not None:
        return watched.dead
    waiting = [call.since for call in watched.calls if call.since is not None]
    if not waiting:
        return None
    silent_s = now - max(watched.last_token, min(waiting))
    reading_s = sum(call.unread_tokens for call in watched.calls) / PREFILL_TOKENS_PER_S
    if silent_s <= watched.stall_s + reading_s:
        return None
    return f"no token for {silent_s:.0f} s"


async def watch(
    look: Callable[[], Iterable[Watched]], report: Callable[[str, str], None], clock: Callable[[], float]
) -> None:
    """Look every second, for ever. `report` gets the model and the reason."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        now = clock()
        for watched in list(look()):
            if (reason := verdict(watched, now)) is not None:
                report(watched.model, reason)
