"""The store for the event loop: reads are awaited, what the ledger changes is written soon after, in order.

All of it runs in one thread. Writes that fail (the disk is full, the database is locked) are kept and tried again with
the next ones, in one transaction, so that nothing is counted twice or lost while the process lives.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import structlog

from citadel.accounts.auth import Account, NewKey, Scope, verify
from citadel.accounts.quota import DAY_S, Now, Settlement, Tally
from citadel.accounts.store import NotWritten, Store, day_number

log = structlog.get_logger("citadel.accounts")

T = TypeVar("T")


def utc_now() -> Now:
    moment = datetime.now(UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return Now(time.monotonic(), day_number(moment), DAY_S - (moment - midnight).total_seconds())


class AsyncStore:
    """A `Store` that does not hold up the event loop, and the ledger's `Journal`. Making one blocks."""

    def __init__(self, data_dir: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._store = self._thread.submit(Store, data_dir).result()
        self._pending: deque[Callable[[Store], None]] = deque()
        """Writes not done yet, oldest first; only the thread takes from it."""
        self._called = False
        """Whether the thread has been told of writes that it has not looked at yet."""

    # -- reads

    async def authenticate(self, id_: str, secret: str) -> Account:
        """The account of a key, as it is in the file now. Raises InvalidApiKey."""
        row = await self.run(lambda store: store.find_key(id_))
        return verify(row, secret, datetime.now(UTC))

    async def first_key(self) -> NewKey | None:
        """Where there is no key at all, one for the owner; else None."""
        scopes: frozenset[Scope] = frozenset({"llm", "admin"})
        return await self.run(lambda store: None if store.has_keys() else store.create_key("owner", scopes))

    async def learned_loads(self) -> dict[str, float]:
        return await self.run(lambda store: store.learned_loads())

    async def tally(self) -> Tally:
        return await self.run(lambda store: store.tally(utc_now().day))

    async def run(self, work: Callable[[Store], T]) -> T:
        """`work` in the store's thread, after all writes so far."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._after_writes, work)

    # -- writes, which nobody waits for

    def learn_load(self, model: str, seconds: float) -> None:
        self._write(lambda store: store.learn_load(model, seconds))

    def call_began(self, call: str, account: Account, model: str, day: int) -> None:
        at = time.time()
        self._write(lambda store: store.begin_call(call, account.key_id, account.member, model, day, at))

    def call_ended(self, call: str, account: Account, model: str, began: int, ended: int, counts: Settlement) -> None:
        self._write(lambda store: store.end_call(call, account.key_id, account.member, model, began, ended, counts))

    async def close(self) -> None:
        await self.run(lambda store: store.close())
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, change: Callable[[Store], None]) -> None:
        self._pending.append(change)
        if not self._called:  # what comes until it looks is written with it: waking it costs as much as a write
            self._called = True
            self._thread.submit(self._flush)

    def _after_writes(self, work: Callable[[Store], T]) -> T:
        self._flush()
        return work(self._store)

    def _flush(self) -> None:
        """In the thread: all writes that wait, in one transaction; all of them wait on if it fails."""
        self._called = False
        changes = list(self._pending)
        if not changes:
            return
        try:
            with self._store.transaction():
                for change in changes:
                    change(self._store)
        except NotWritten as error:
            log.warning("usage is not written yet", waiting=len(changes), reason=str(error))
            return
        for _ in changes:
            self._pending.popleft()
