"""What a disk can do to a running server: weights cut short, a database that is locked, a database that is full."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from citadel.accounts import store
from tests.conftest import Serving, make_config, serving
from tests.integrity import Delivered, drill
from tests.models.export import GGUF

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def config(folder: Path, **sources: Path) -> Any:
    model = {"engine": "llama", "slots": 2, "max_parallel": 8, "memory_gb": 1}
    return make_config(folder, {name: {**model, "source": str(path)} for name, path in sources.items()})


async def ask(server: Serving, delivered: Delivered) -> None:
    async with server.chat(model="m", max_tokens=4, ignore_eos=True) as response:
        assert response.status == 200, await response.text()
        delivered.whole((await response.json())["usage"])


@asynccontextmanager
async def drilled(config: Any) -> AsyncGenerator[tuple[Serving, Delivered]]:
    """A server that has answered one call, and the account of what it then delivers."""
    async with serving(config, keep_alive=False) as server:
        await ask(server, Delivered())
        async with drill(server.session, server.url, os.getpid()) as delivered:
            yield server, delivered
        server.services.registry.check_integrity()


async def written(server: Serving) -> list[tuple[int, int]]:
    """Calls and tokens in the database, once all that waits to be written is tried."""
    rows = await server.services.store.run(lambda opened: opened.usage(0, 10**6))
    return [(row["calls"], row["prompt_tokens"] + row["completion_tokens"]) for row in rows]


def cut_short(cut: Path, part: float) -> None:
    whole = Path(GGUF).read_bytes()
    cut.write_bytes(whole[: int(len(whole) * part)])


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
async def test_weights_cut_short_make_one_model_unavailable(tmp_path: Path, part: float) -> None:
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(cut_short, cut, part)
    async with drilled(config(tmp_path, m=Path(GGUF), cut=cut)) as (server, delivered):
        async with server.chat(model="cut") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (502, "llm-unavailable", "llm-unavailable")
            assert error["reason"]
        await ask(server, delivered)


async def test_calls_go_on_while_the_database_is_locked_and_are_counted_once_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(store.sqlite3, "connect", lambda *args, **named: connect(*args, **{**named, "timeout": 0.1}))
    async with drilled(config(tmp_path, m=Path(GGUF))) as (server, delivered):
        before = await written(server)
        holder = await asyncio.to_thread(lambda: connect(tmp_path / "data" / "citadel.db", check_same_thread=False))
        await asyncio.to_thread(holder.execute, "BEGIN EXCLUSIVE")
        try:
            await ask(server, delivered)
            await ask(server, delivered)
            assert await written(server) == before == [(1, before[0][1])]
        finally:
            await asyncio.to_thread(holder.rollback)
            await asyncio.to_thread(holder.close)
        await ask(server, delivered)
        assert await written(server) == [(4, before[0][1] + delivered.tokens)]


async def test_calls_go_on_while_the_disk_is_full_and_are_counted_once_after(tmp_path: Path) -> None:
    async with drilled(config(tmp_path, m=Path(GGUF))) as (server, delivered):
        before = await written(server)

        def full(opened: store.Store) -> None:
            """From here on the file cannot grow, which SQLite reports as it does a full disk."""
            (pages,) = opened._db.execute("PRAGMA page_count").fetchone()
            opened._db.execute(f"PRAGMA max_page_count = {pages}")

        await server.services.store.run(full)
        async with asyncio.timeout(100):
            while not server.services.store._pending:  # until the last page is full
                await ask(server, delivered)
                now = await written(server)
        await ask(server, delivered)
        assert await written(server) == now
        assert before[0][0] <= now[0][0] < 1 + delivered.calls
        await server.services.store.run(lambda opened: opened._db.execute("PRAGMA max_page_count = 1000000").fetchall())
        assert await written(server) == [(1 + delivered.calls, before[0][1] + delivered.tokens)]
