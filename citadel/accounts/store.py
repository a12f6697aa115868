"""The only SQL: members' keys, and the load times learnt on this machine, in `citadel.db` in the data directory.

The file is in WAL mode, so that the command line can write while the server reads. All methods of `Store` block;
`AsyncStore` runs them in a thread of its own, one after the other.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from citadel.accounts.auth import Account, KeyRow, NewKey, Scope, new_key, verify

T = TypeVar("T")

MIGRATIONS: Final = (
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        member TEXT NOT NULL,
        scopes TEXT NOT NULL,
        secret_sha256 TEXT NOT NULL,
        created_at TEXT NOT NULL,
        expires_at TEXT,
        revoked_at TEXT
    ) STRICT;
    CREATE TABLE loads (model TEXT PRIMARY KEY, seconds REAL NOT NULL) STRICT;
    """,
)
"""Each is applied once, in order; `PRAGMA user_version` counts them. Never change one that has been released."""


class Store:
    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(data_dir / "citadel.db", isolation_level=None, check_same_thread=False, timeout=10)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._migrate()

    def close(self) -> None:
        self._db.close()

    # -- keys

    def create_key(self, member: str, scopes: frozenset[Scope], expires_at: datetime | None = None) -> NewKey:
        key = new_key()
        self._db.execute(
            "INSERT INTO keys (id, member, scopes, secret_sha256, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)",
            (key.id, member, " ".join(sorted(scopes)), key.secret_sha256, _text(datetime.now(UTC)), _text(expires_at)),
        )
        return key

    def revoke_key(self, id_: str) -> bool:
        """False if there is no such key, or it is revoked already."""
        now = _text(datetime.now(UTC))
        changed = self._db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, id_))
        return changed.rowcount == 1

    def find_key(self, id_: str) -> KeyRow | None:
        row = self._db.execute(f"{_SELECT_KEY} WHERE id = ?", (id_,)).fetchone()
        return None if row is None else _key_row(row)

    def list_keys(self) -> list[KeyRow]:
        return [_key_row(row) for row in self._db.execute(f"{_SELECT_KEY} ORDER BY created_at, id")]

    def has_keys(self) -> bool:
        return self._db.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None

    # -- load times

    def learned_loads(self) -> dict[str, float]:
        """Seconds of the last load, by model id."""
        return dict(self._db.execute("SELECT model, seconds FROM loads"))

    def learn_load(self, model: str, seconds: float) -> None:
        self._db.execute(
            "INSERT INTO loads VALUES (?, ?) ON CONFLICT (model) DO UPDATE SET seconds = excluded.seconds",
            (model, seconds),
        )

    def _migrate(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            for number, script in enumerate(MIGRATIONS[version:], version + 1):
                for statement in filter(str.strip, script.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number}")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class AsyncStore:
    """A `Store` for the event loop, which must not wait for a disk."""

    def __init__(self, data_dir: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._store = self._thread.submit(Store, data_dir).result()

    async def authenticate(self, id_: str, secret: str) -> Account:
        """The account of a key, as it is in the file now. Raises InvalidApiKey."""
        row = await self._run(lambda store: store.find_key(id_))
        return verify(row, secret, datetime.now(UTC))

    async def first_key(self) -> NewKey | None:
        """Where there is no key at all, one for the owner; else None."""
        scopes: frozenset[Scope] = frozenset({"llm", "admin"})
        return await self._run(lambda store: None if store.has_keys() else store.create_key("owner", scopes))

    async def learned_loads(self) -> dict[str, float]:
        return await self._run(lambda store: store.learned_loads())

    def learn_load(self, model: str, seconds: float) -> None:
        """Written soon; nobody waits for it."""
        self._thread.submit(lambda: self._store.learn_load(model, seconds))

    async def close(self) -> None:
        await self._run(lambda store: store.close())
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[Store], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)


_SELECT_KEY: Final = "SELECT id, member, scopes, secret_sha256, created_at, expires_at, revoked_at FROM keys"


def _key_row(row: tuple[Any, ...]) -> KeyRow:
    id_, member, scopes, digest, created, expires, revoked = row
    return KeyRow(
        id=id_,
        member=member,
        scopes=frozenset(cast("list[Scope]", scopes.split())),
        secret_sha256=digest,
        created_at=datetime.fromisoformat(created),
        expires_at=_time(expires),
        revoked_at=_time(revoked),
    )


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
