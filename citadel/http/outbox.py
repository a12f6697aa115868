"""What streams are to send, sent at the end of the event loop's turn.

A model makes a piece for each of its streams at once. A write is a system call that wakes the reader, and where cores
are few the reader takes this one: what comes next begins with cold caches. So all of a turn's pieces are made first,
and then written, one right behind the other. What one stream says in a turn is one write.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

log = structlog.get_logger("citadel.http")


class Flushable(Protocol):
    def flush(self) -> None:
        """Write what is due."""
        ...


class Outbox:
    """Of one event loop."""

    def __init__(self) -> None:
        self._due: list[Flushable] = []

    def add(self, sender: Flushable) -> None:
        """Flush `sender` when everything that is ready now has had its turn. To be called once until then."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(sender)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            try:
                sender.flush()
            except Exception:  # others are waiting behind it
                log.exception("fault of the server")
