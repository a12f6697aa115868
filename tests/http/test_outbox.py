"""When the pieces of streams are written. Which of them share a write: see test_raw_http."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from citadel.http import routes_status
from citadel.http.outbox import Outbox
from tests.conftest import make_config, serving, write_script


class Stream:
    """Says something in each turn, as the pieces of a model come."""

    def __init__(self, name: str, outbox: Outbox, seen: list[str]) -> None:
        self._name, self._outbox, self._seen = name, outbox, seen

    async def say(self) -> None:
        self._seen.append(f"made {self._name}")
        self._outbox.add(self)

    def flush(self) -> None:
        self._seen.append(f"wrote {self._name}")


async def test_all_that_is_ready_is_made_before_any_of_it_is_written() -> None:
    seen: list[str] = []
    outbox = Outbox()
    for _ in range(2):
        await asyncio.gather(*(Stream(name, outbox, seen).say() for name in "abc"))
        await asyncio.sleep(0)
    turn = ["made a", "made b", "made c", "wrote a", "wrote b", "wrote c"]
    assert seen == turn * 2


async def test_a_stream_that_cannot_be_written_keeps_nobody_else_waiting() -> None:
    class Broken(Stream):
        def flush(self) -> None:
            raise MemoryError

    seen: list[str] = []
    outbox = Outbox()
    await asyncio.gather(Broken("a", outbox, seen).say(), Stream("b", outbox, seen).say())
    await asyncio.sleep(0)
    assert seen == ["made a", "made b", "wrote b"]


async def test_a_fault_in_the_midst_of_the_status_stream_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def snapshot(_services: object) -> dict[str, int]:
        if told := given.pop():
            return {"told": told}
        raise ValueError("a fault")

    given = [0, 2, 1]
    monkeypatch.setattr(routes_status, "snapshot", snapshot)
    monkeypatch.setattr(routes_status, "EVERY_S", 0)
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    config = make_config(tmp_path, {"m": {"engine": "replay", "source": source}})
    async with serving(config, scopes=("llm", "admin")) as server:
        async with server.session.get(server.url + "/admin/status/stream") as response:
            assert await response.text() == 'data: {"told":1}\n\ndata: {"told":2}\n\n'
