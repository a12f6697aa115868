"""The only SQL: members, keys, what they used, and load times learnt here; `citadel.db` in the data directory.

The file is in WAL mode, so that the command line can write while the server reads. All methods block; the server uses
them through `journal.AsyncStore`. Times are UTC, as ISO text; a day is the number of its midnight (days since 1970).
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from citadel.accounts.auth import KeyLimits, KeyRow, MemberLimits, NewKey, Scope, new_key
from citadel.accounts.quota import DAY_S, Settlement, Tally

if TYPE_CHECKING:
    from collections.abc import Generator

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
    """
    CREATE TABLE members (
        name TEXT PRIMARY KEY,
        daily_tokens INTEGER,
        open_per_member INTEGER,
        max_parallel INTEGER
    ) STRICT;
    INSERT INTO members (name) SELECT DISTINCT member FROM keys;
    ALTER TABLE keys ADD COLUMN calls_per_minute INTEGER;
    ALTER TABLE keys ADD COLUMN calls_per_day INTEGER;
    ALTER TABLE keys ADD COLUMN daily_calls INTEGER;
    ALTER TABLE keys ADD COLUMN models TEXT;
    CREATE TABLE calls (id TEXT PRIMARY KEY, key TEXT NOT NULL, at REAL NOT NULL) STRICT;
    CREATE INDEX calls_at ON calls (at);
    CREATE TABLE usage (
        day INTEGER NOT NULL,
        key TEXT NOT NULL,
        member TEXT NOT NULL,
        model TEXT NOT NULL,
        calls INTEGER NOT NULL DEFAULT 0,
        prompt_tokens INTEGER NOT NULL DEFAULT 0,
        completion_tokens INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (day, key, model)
    ) STRICT, WITHOUT ROWID;
    """,
    "ALTER TABLE keys ADD COLUMN successor TEXT;",
)
"""Each is applied once, in order; `PRAGMA user_version` counts them. Never change one that has been released."""

KEY_LIMITS: Final = ("calls_per_minute", "calls_per_day", "daily_calls")
MEMBER_LIMITS: Final = ("daily_tokens", "open_per_member", "max_parallel")


class NotWritten(Exception):
    """The database could not take a change: its disk is full, or somebody holds it locked."""


class CannotOpen(Exception):
    """There is no using this database: it cannot be written, is damaged, or is of a newer Citadel."""


class Store:
    def __init__(self, data_dir: Path) -> None:
        """Makes the database where there is none, and brings an older one up to date. Raises CannotOpen."""
        path = data_dir / "citadel.db"
        try:
            data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        except (OSError, sqlite3.Error) as error:
            raise CannotOpen(f"{path}: cannot be opened: {error}") from error
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate()
        except (CannotOpen, sqlite3.Error, NotWritten) as error:
            self._db.close()
            raise CannotOpen(f"{path}: cannot be used: {error}") from error

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All of the block's changes, or none. Raises NotWritten."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise NotWritten(str(error)) from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # a full disk has rolled it back already
            self._db.execute("ROLLBACK")

    # -- keys and members

    def create_key(
        self,
        member: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None = None,
        limits: KeyLimits = KeyLimits(),  # noqa: B008 - it is frozen
    ) -> NewKey:
        key = new_key()
        models = None if limits.models is None else json.dumps(sorted(limits.models))
        with self.transaction():
            self._db.execute("INSERT INTO members (name) VALUES (?) ON CONFLICT DO NOTHING", (member,))
            self._db.execute(
                "INSERT INTO keys (id, member, scopes, secret_sha256, created_at, expires_at,"
                " calls_per_minute, calls_per_day, daily_calls, models) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(key.id, member, " ".join(sorted(scopes)), key.secret_sha256, _text(datetime.now(UTC))),
                    *(_text(expires_at), limits.calls_per_minute, limits.calls_per_day, limits.daily_calls, models),
                ),
            )
        return key

    def revoke_key(self, id_: str) -> bool:
        """False if there is no such key, or it is revoked already."""
        now = _text(datetime.now(UTC))
        changed = self._db.execute("UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, id_))
        return changed.rowcount == 1

    def rotate_key(self, id_: str, old_ends_at: datetime) -> NewKey | None:
        """A new key with the same settings; the old one works until `old_ends_at`.

        None if there is no such key, or it has ended, or has a successor already.
        """
        row = self.find_key(id_)
        if row is None or row.revoked_at is not None or row.rotated:
            return None
        if row.expires_at is not None and row.expires_at <= datetime.now(UTC):
            return None
        key = self.create_key(row.member, row.scopes, row.expires_at, row.limits)
        ends = old_ends_at if row.expires_at is None else min(old_ends_at, row.expires_at)
        self._db.execute("UPDATE keys SET expires_at = ?, successor = ? WHERE id = ?", (_text(ends), key.id, id_))
        return key

    def find_key(self, id_: str) -> KeyRow | None:
        row = self._rows(f"{_SELECT_KEY} WHERE id = ?", id_)
        return _key_row(row[0]) if row else None

    def list_keys(self) -> list[KeyRow]:
        return [_key_row(row) for row in self._rows(f"{_SELECT_KEY} ORDER BY created_at, id")]

    def has_keys(self) -> bool:
        return bool(self._rows("SELECT 1 FROM keys LIMIT 1"))

    def set_member(self, name: str, changes: Mapping[str, int | None]) -> bool:
        """Change a member's limits, by the names of `MemberLimits`. False if there is no such member."""
        for column, value in changes.items():
            if column not in MEMBER_LIMITS:
                raise ValueError(f"there is no limit {column!r}")
            changed = self._db.execute(f"UPDATE members SET {column} = ? WHERE name = ?", (value, name))  # noqa: S608 - a column of the list
            if changed.rowcount == 0:
                return False
        return bool(self._rows("SELECT 1 FROM members WHERE name = ?", name))

    def list_members(self) -> dict[str, MemberLimits]:
        rows = self._rows("SELECT * FROM members ORDER BY name")
        return {row["name"]: MemberLimits(*(row[name] for name in MEMBER_LIMITS)) for row in rows}

    # -- usage

    def begin_call(self, call: str, key: str, member: str, model: str, day: int, at: float) -> None:
        """`at` in Unix seconds. Calls older than a day leave the sliding windows, and the table."""
        self._db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?)", (call, key, at))
        self._db.execute("DELETE FROM calls WHERE at < ?", (at - DAY_S,))
        self._add_usage(day, key, member, model, calls=1)

    def end_call(self, call: str, key: str, member: str, model: str, began: int, ended: int, done: Settlement) -> None:
        if not done.keeps_window:
            self._db.execute("DELETE FROM calls WHERE id = ?", (call,))
        if not done.keeps_call:
            self._add_usage(began, key, member, model, calls=-1)
        if done.prompt_tokens or done.completion_tokens:
            self._add_usage(ended, key, member, model, prompt=done.prompt_tokens, completion=done.completion_tokens)

    def _add_usage(
        self, day: int, key: str, member: str, model: str, *, calls: int = 0, prompt: int = 0, completion: int = 0
    ) -> None:
        self._db.execute(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, key, model) DO UPDATE SET"
            " calls = calls + excluded.calls, prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
            " completion_tokens = completion_tokens + excluded.completion_tokens",
            (day, key, member, model, calls, prompt, completion),
        )

    def tally(self, today: int) -> Tally:
        """What counts already. The day is the latest that was ever written, if the clock says an earlier one."""
        latest = self._rows("SELECT max(day) AS day FROM usage")[0]["day"]
        tally = Tally(day=max(today, latest or 0))
        for row in self._rows("SELECT * FROM usage WHERE day = ?", tally.day):
            tally.calls[row["key"]] += row["calls"]
            tally.tokens[row["member"]] += row["prompt_tokens"] + row["completion_tokens"]
        now = time.time()
        for row in self._rows("SELECT key, at FROM calls WHERE at > ?", now - DAY_S):
            # A call from the future is the clock's fault; it counts as one made now.
            tally.ages_s.setdefault(row["key"], []).append(max(0.0, now - row["at"]))
        tally.calls = Counter({key: count for key, count in tally.calls.items() if count > 0})
        return tally

    def usage(self, first_day: int, last_day: int) -> list[dict[str, Any]]:
        """By day, member, key and model: calls, prompt and completion tokens; `day` as YYYY-MM-DD."""
        rows = self._rows(
            "SELECT * FROM usage WHERE day BETWEEN ? AND ? ORDER BY day, member, key, model", first_day, last_day
        )
        return [{**row, "day": day_text(row["day"])} for row in map(dict[str, Any], rows)]

    # -- load times

    def learned_loads(self) -> dict[str, float]:
        """Seconds of the last load, by model id."""
        return {row["model"]: row["seconds"] for row in self._rows("SELECT model, seconds FROM loads")}

    def learn_load(self, model: str, seconds: float) -> None:
        self._db.execute(
            "INSERT INTO loads VALUES (?, ?) ON CONFLICT (model) DO UPDATE SET seconds = excluded.seconds",
            (model, seconds),
        )

    def _rows(self, query: str, *arguments: Any) -> list[sqlite3.Row]:
        cursor = self._db.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, arguments).fetchall()

    def _migrate(self) -> None:
        with self.transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise CannotOpen(f"it is of a newer Citadel (version {version}, this one knows {len(MIGRATIONS)})")
            for number, script in enumerate(MIGRATIONS[version:], version + 1):
                for statement in filter(str.strip, script.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number}")


def day_number(moment: datetime) -> int:
    return moment.astimezone(UTC).date().toordinal() - _EPOCH_ORDINAL


def day_text(day: int) -> str:
    return datetime.fromordinal(day + _EPOCH_ORDINAL).date().isoformat()


_EPOCH_ORDINAL: Final = datetime(1970, 1, 1, tzinfo=UTC).toordinal()
_SELECT_KEY: Final = "SELECT * FROM keys JOIN members ON members.name = keys.member"


def _key_row(row: sqlite3.Row) -> KeyRow:
    models = row["models"]
    return KeyRow(
        id=row["id"],
        member=row["member"],
        scopes=frozenset(cast("list[Scope]", row["scopes"].split())),
        secret_sha256=row["secret_sha256"],
        created_at=datetime.fromisoformat(row["created_at"]),
        expires_at=_time(row["expires_at"]),
        revoked_at=_time(row["revoked_at"]),
        rotated=row["successor"] is not None,
        limits=KeyLimits(
            *(row[name] for name in KEY_LIMITS), models=None if models is None else frozenset(json.loads(models))
        ),
        member_limits=MemberLimits(*(row[name] for name in MEMBER_LIMITS)),
    )


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
