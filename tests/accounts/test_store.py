"""The database: keys, limits, usage; kept over a kill, a full disk and a lock; migrations keep what was there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from citadel.accounts import auth
from citadel.accounts.auth import Account, KeyLimits, MemberLimits
from citadel.accounts.journal import AsyncStore
from citadel.accounts.quota import Settlement
from citadel.accounts.store import MIGRATIONS, CannotOpen, NotWritten, Store, day_number, day_text
from citadel.errors import InvalidApiKey, MissingApiKey
from tests.process import ROOT

ANN = Account("ann", "key00001", frozenset({"llm"}))
KEPT = Settlement(keeps_call=True, keeps_window=True, prompt_tokens=3, completion_tokens=4)


def sign_in(store: Store, text: str) -> Account:
    id_, secret = auth.parse_authorization({"Authorization": f"Bearer {text}"})
    return auth.verify(store.find_key(id_), secret, datetime.now(UTC))


def test_a_key_opens_until_it_is_revoked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = store.create_key("ann", frozenset({"llm", "gpu"}))
    assert sign_in(store, key.text) == Account("ann", key.id, frozenset({"llm", "gpu"}))
    assert store.revoke_key(key.id)
    assert not store.revoke_key(key.id)
    with pytest.raises(InvalidApiKey):
        sign_in(store, key.text)


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    store = Store(tmp_path)
    past = datetime.now(UTC) - timedelta(seconds=1)
    with pytest.raises(InvalidApiKey):
        sign_in(store, store.create_key("ann", frozenset({"llm"}), past).text)


def test_a_rotated_key_and_its_successor_live_side_by_side(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = store.create_key("ann", frozenset({"llm"}), limits=KeyLimits(daily_calls=7, models=frozenset({"m"})))
    new = store.rotate_key(old.id, datetime.now(UTC) + timedelta(hours=1))
    assert new is not None
    assert (
        sign_in(store, old.text).limits
        == sign_in(store, new.text).limits
        == KeyLimits(daily_calls=7, models=frozenset({"m"}))
    )
    assert store.rotate_key(new.id, datetime.now(UTC) - timedelta(seconds=5)) is not None
    with pytest.raises(InvalidApiKey):
        sign_in(store, new.text)
    assert store.rotate_key("nosuchid", datetime.now(UTC)) is None
    assert store.rotate_key(old.id, datetime.now(UTC)) is None  # it has a successor
    assert store.rotate_key(new.id, datetime.now(UTC)) is None  # it has ended


def test_the_secret_is_not_in_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    secret = store.create_key("ann", frozenset({"llm"})).text.split("_")[2]
    store.close()
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert files
    assert all(secret.encode() not in path.read_bytes() for path in files)


def test_limits_of_a_member_come_with_every_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = store.create_key("ann", frozenset({"llm"}))
    assert store.set_member("ann", {"daily_tokens": 9, "max_parallel": 2})
    assert not store.set_member("bob", {"daily_tokens": 9})
    assert sign_in(store, key.text).member_limits == MemberLimits(daily_tokens=9, max_parallel=2)
    assert store.set_member("ann", {"daily_tokens": None})
    assert store.list_members() == {"ann": MemberLimits(max_parallel=2)}


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({}, MissingApiKey),
        ({"Authorization": ""}, InvalidApiKey),
        ({"Authorization": "Bearer"}, InvalidApiKey),
        ({"Authorization": "Bearer hlk_short_key"}, InvalidApiKey),
        ({"Authorization": "Token hlk_abcdefgh_" + "x" * 43}, InvalidApiKey),
        ({"Authorization": "Bearer hlk_abcdefgh_" + "é" * 43}, InvalidApiKey),
    ],
)
def test_what_is_no_key_is_refused(headers: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        auth.parse_authorization(headers)


def test_usage_is_added_up_and_given_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    at = datetime.now(UTC).timestamp()
    for call, end in {
        "1": KEPT,
        "2": Settlement(keeps_call=False, keeps_window=True, prompt_tokens=0, completion_tokens=0),
        "3": Settlement(keeps_call=False, keeps_window=False, prompt_tokens=0, completion_tokens=0),
    }.items():
        store.begin_call(call, "key00001", "ann", "m", 20_000, at)
        store.end_call(call, "key00001", "ann", "m", 20_000, 20_001, end)
    assert store.usage(0, 99_999) == [
        {"day": day_text(20_000), "key": "key00001", "member": "ann", "model": "m"}
        | {"calls": 1, "prompt_tokens": 0, "completion_tokens": 0},
        {"day": day_text(20_001), "key": "key00001", "member": "ann", "model": "m"}
        | {"calls": 0, "prompt_tokens": 3, "completion_tokens": 4},
    ]
    tally = store.tally(20_001)
    assert (tally.calls, tally.tokens) == ({}, {"ann": 7})
    assert len(tally.ages_s["key00001"]) == 2


def test_the_tally_is_of_the_latest_day_that_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin_call("1", "key00001", "ann", "m", 20_000, datetime.now(UTC).timestamp())
    assert store.tally(19_999).day == 20_000
    assert store.tally(19_999).calls == {"key00001": 1}
    assert store.tally(20_001).calls == {}


def test_days_are_utc_and_readable() -> None:
    assert day_number(datetime(1970, 1, 2, 23, 59, tzinfo=UTC)) == 1
    assert day_text(day_number(datetime(2026, 11, 30, tzinfo=UTC))) == "2026-11-30"


def test_a_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "citadel.db")
    old.executescript(MIGRATIONS[0])
    old.execute("INSERT INTO keys VALUES ('key00001', 'ann', 'llm', 'digest', '2026-01-01T00:00:00+00:00', NULL, NULL)")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    store = Store(tmp_path)
    assert [(row.id, row.member, row.limits) for row in store.list_keys()] == [("key00001", "ann", KeyLimits())]
    assert store.list_members() == {"ann": MemberLimits()}
    store.close()
    Store(tmp_path).close()


def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    newer = sqlite3.connect(tmp_path / "citadel.db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(CannotOpen, match="of a newer Citadel"):
        Store(tmp_path)


async def test_writes_that_fail_are_kept_and_tried_again(tmp_path: Path) -> None:
    store = await asyncio.to_thread(AsyncStore, tmp_path)
    await store.run(lambda each: each._db.execute("PRAGMA busy_timeout = 1"))
    other = sqlite3.connect(tmp_path / "citadel.db")
    other.execute("BEGIN EXCLUSIVE")
    store.call_began("1", ANN, "m", 20_000)
    store.call_ended("1", ANN, "m", 20_000, 20_000, KEPT)
    assert await store.run(lambda each: each.usage(0, 99_999)) == []
    other.rollback()
    other.close()
    (row,) = await store.run(lambda each: each.usage(0, 99_999))
    assert (row["calls"], row["prompt_tokens"], row["completion_tokens"]) == (1, 3, 4)
    await store.close()


async def test_a_full_disk_loses_and_doubles_nothing(tmp_path: Path) -> None:
    store = await asyncio.to_thread(AsyncStore, tmp_path)
    pages = await store.run(lambda each: each._db.execute("PRAGMA page_count").fetchone()[0])
    await store.run(lambda each: each._db.execute(f"PRAGMA max_page_count = {pages}"))
    for number in range(400):
        store.call_began(f"call-{number:04}-{'x' * 100}", ANN, "m", 20_000)
    refused = await store.run(lambda each: sum(row["calls"] for row in each.usage(0, 99_999)))
    assert refused < 400
    await store.run(lambda each: each._db.execute("PRAGMA max_page_count = 100000"))
    assert await store.run(lambda each: sum(row["calls"] for row in each.usage(0, 99_999))) == 400
    await store.close()


def test_a_transaction_that_fails_says_so_and_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(NotWritten):
        _write_nowhere(store)
    assert store.learned_loads() == {}


KILLED = """
import sys
from pathlib import Path
from citadel.accounts.store import Store
from citadel.accounts.quota import Settlement
store = Store(Path(sys.argv[1]))
kept = Settlement(keeps_call=True, keeps_window=True, prompt_tokens=1, completion_tokens=1)
for number in range(10**9):
    with store.transaction():
        store.begin_call(str(number), "key00001", "ann", "m", 20_000, 1e9 + number)
        store.end_call(str(number), "key00001", "ann", "m", 20_000, 20_000, kept)
    print(number + 1, flush=True)
"""


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 200:
            process.send_signal(signal.SIGKILL)
            break
    said = [int(line), *map(int, process.stdout.read().split())][-1]
    process.stdout.close()
    process.wait()
    (row,) = Store(tmp_path).usage(0, 99_999)
    assert row["calls"] in (said, said + 1)
    assert row["calls"] == row["prompt_tokens"] == row["completion_tokens"]


def test_a_copy_made_while_it_is_in_use_is_whole(tmp_path: Path) -> None:
    """As docs/deploy.md says to make one."""
    store = Store(tmp_path)
    key = store.create_key("ann", frozenset({"llm"}))
    copy = tmp_path / "copy"
    copy.mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "citadel.db")) as other:
        other.execute("VACUUM INTO ?", (str(copy / "citadel.db"),))
    store.create_key("bob", frozenset({"llm"}))
    restored = Store(copy)
    assert [row.id for row in restored.list_keys()] == [key.id]
    restored.close()


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "citadel.db").write_bytes(b"no database" * 100)
    with pytest.raises(CannotOpen, match=r"citadel\.db: cannot be used: file is not a database"):
        Store(tmp_path)
    with pytest.raises(CannotOpen, match=r"citadel\.db: cannot be opened"):
        Store(tmp_path / "citadel.db" / "below")


def _write_nowhere(store: Store) -> None:
    with store.transaction():
        store.learn_load("m", 1.0)
        store._db.execute("INSERT INTO nowhere VALUES (1)")
