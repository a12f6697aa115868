"""When the pieces of streams are written, and which of them share a write."""

from __future__ import annotations

import asyncio
import json
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


async def test_what_is_said_in_one_turn_is_one_chunk_and_the_last_one_comes_with_the_end(tmp_path: Path) -> None:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["Hello", " you"], "delay_ms": 20}])
    config = make_config(tmp_path, {"m": {"engine": "replay", "source": source}})
    async with serving(config) as server:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        async with server.chat() as response:  # the model is loaded by it, so that the next call has no comments
            assert response.status == 200
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            chunks: list[str] = []
            while size := int(await reader.readuntil(b"\r\n"), 16):
                chunks.append((await reader.readexactly(size + 2)).decode())
        writer.close()
    said = [
        [line.removeprefix("data: ") for line in chunk.split("\n") if line.startswith("data: ")] for chunk in chunks
    ]
    assert [len(events) for events in said] == [1, 1, 3, 1], said  # role; text; text, its end, usage; [DONE]
    assert json.loads(said[0][0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(said[1][0])["choices"][0]["delta"] == {"content": "Hello"}
    assert json.loads(said[2][0])["choices"][0]["delta"] == {"content": " you"}
    assert json.loads(said[2][1])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(said[2][2])["usage"]["completion_tokens"] == 2
    assert said[3] == ["[DONE]"]


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
