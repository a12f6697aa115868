"""Bytes on a real socket: what is no valid HTTP gets an error like any other, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import zlib
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from citadel.http import body as body_module
from citadel.http import server as server_module
from citadel.http import stream as stream_module
from tests.conftest import Serving, make_config, serving, write_script

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"messages": [{"role": "user", "content": "hi"}]}'
LINES = [
    {"when": "large", "pieces": ["x" * 100_000] * 100},
    {"when": "greet", "pieces": ["Hello", " you"], "delay_ms": 20},
    {"when": "slow", "pieces": ["a"] * 40, "delay_ms": 5},
    {"pieces": ["ok"]},
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", LINES)
    async with serving(make_config(tmp_path, {"m": {"engine": "replay", "source": source}})) as running:
        yield running
        async with running.chat() as response:
            assert response.status == 200, "nobody else is hindered"
        running.services.registry.check_integrity()


async def connect(server: Serving) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def answer(server: Serving, sent: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the first answer to these bytes."""
    reader, writer = await connect(server)
    try:
        async with asyncio.timeout(30):
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines[1:-2])}
            raw = await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()
    return int(lines[0].split()[1]), headers, json.loads(raw)


NO_HTTP = {
    "no request line": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + b"x" * 50 + b"\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nsecret-prompt\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nA: " + b"secret-prompt" * 10_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: x\r\n" % index for index in range(40_000)) + b"\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "two lengths": CHAT + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nsecret-prompt",
    "a length that is none": CHAT + b"Content-Length: -1\r\n\r\n",
    "a bad chunk size": CHAT + b"Transfer-Encoding: chunked\r\n\r\nsecret-prompt\r\n",
    "length and chunks": CHAT + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another protocol": b"GET / SPDY/3\r\n\r\n",
    "no HTTP on Anthropic's route": b"POST /v1/messages?x=1 HTTP/1.1\r\nsecret-prompt\r\n\r\n",
}


@pytest.mark.parametrize("case", NO_HTTP)
async def test_what_is_no_http_is_told_so_in_the_format_of_its_route(
    server: Serving, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = NO_HTTP[case]
    status, headers, got = await answer(server, sent)
    assert status == 400
    if sent.startswith(CHAT):
        assert got["error"]["code"] == "bad_header"
        assert got["error"]["type"] == "invalid_request_error"
    elif b"/v1/messages" in sent:
        assert (got["type"], got["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert (got["ok"], got["code"], got["detail"]) == (False, "bad_request", {"code": "bad_header"})
    assert headers["content-type"] == "application/json"
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "secret-prompt" not in json.dumps(got) + capfd.readouterr().err


async def test_on_a_connection_that_goes_on_the_route_is_that_of_the_latest_head(server: Serving) -> None:
    reader, writer = await connect(server)
    async with asyncio.timeout(30):
        for sent, begins in (
            (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b'{"ok":true'),
            (CHAT + b"Content-Length: 2\r\n\r\n{}", b'{"error":{'),
            (b"GET /heal", b""),
            (b"thz HTTP/1.1\r\nno header\r\n\r\n", b'{"ok":false'),
        ):
            writer.write(sent)
            if begins:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].split()[0])
                assert (await reader.readexactly(length)).startswith(begins)
    writer.close()


async def test_a_chunk_that_breaks_off_in_mid_body_is_told_too(server: Serving) -> None:
    reader, writer = await connect(server)
    writer.write(CHAT + b"Authorization: Bearer " + server.key.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(b'5\r\n{"mes\r\n')
    await writer.drain()
    writer.write(b"no size\r\n")
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"X-Request-Id" in head
    writer.close()


async def test_an_expectation_that_nobody_knows_is_a_bad_header(server: Serving) -> None:
    for line, path in ((CHAT.partition(b"\r\n")[0], "chat"), (b"GET /nothing HTTP/1.1", "nothing")):
        status, headers, got = await answer(server, line + b"\r\nHost: x\r\nExpect: foo\r\n\r\n")
        assert status == 400
        assert headers["x-request-id"]
        assert (got["error"]["code"] if path == "chat" else got["detail"]["code"]) == "bad_header"


def chat(server: Serving, sent: bytes, *headers: bytes) -> bytes:
    lines = [b"Authorization: Bearer " + server.key.encode(), b"Content-Length: %d" % len(sent), *headers]
    return CHAT + b"\r\n".join(lines) + b"\r\n\r\n" + sent


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/2.0"])
async def test_what_is_said_in_one_turn_is_one_chunk_and_the_last_one_comes_with_the_end(
    server: Serving, version: bytes
) -> None:
    assert (await answer(server, chat(server, BODY)))[0] == 200  # the model is loaded, so that there are no comments
    fields = {"messages": [{"role": "user", "content": "greet"}], "stream": True}
    sent = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await connect(server)
    writer.write(chat(server, sent).replace(b"HTTP/1.1", version, 1))
    async with asyncio.timeout(30):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/" + version[5:] + b" 200")
        chunks: list[str] = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunks.append((await reader.readexactly(size + 2)).decode())
    writer.close()
    said = [re.findall(r"^data: (.*)$", chunk, re.MULTILINE) for chunk in chunks]
    assert [len(events) for events in said] == [1, 1, 3, 1], said  # role; text; text, its end, usage; [DONE]
    assert json.loads(said[0][0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(said[1][0])["choices"][0]["delta"] == {"content": "Hello"}
    assert json.loads(said[2][0])["choices"][0]["delta"] == {"content": " you"}
    assert json.loads(said[2][1])["choices"][0]["finish_reason"] == "stop"
    assert json.loads(said[2][2])["usage"]["completion_tokens"] == 2
    assert said[3] == ["[DONE]"]


RAW_DEFLATE = zlib.compressobj(wbits=-15)
ENCODED = {
    "gzip": (b"gzip", gzip.compress(BODY)),
    "gzip in two members": (b"gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
    "deflate": (b"deflate", zlib.compress(BODY)),
    "deflate without its header": (b"deflate", RAW_DEFLATE.compress(BODY) + RAW_DEFLATE.flush()),
    "nothing": (b"identity", BODY),
}


@pytest.mark.parametrize("case", ENCODED)
async def test_an_encoding_that_we_know_is_undone(server: Serving, case: str) -> None:
    encoding, sent = ENCODED[case]
    assert (await answer(server, chat(server, sent, b"Content-Encoding: " + encoding)))[0] == 200


BROKEN = {
    "br": (b"br", BODY),
    "zstd": (b"zstd", BODY),
    "several": (b"gzip, gzip", BODY),
    "truncated gzip": (b"gzip", gzip.compress(BODY)[:-9]),
    "gzip without its checksum": (b"gzip", gzip.compress(BODY)[:-8]),
    "a wrong checksum": (b"gzip", gzip.compress(BODY)[:-8] + b"x" * 8),
    "rubbish behind gzip": (b"gzip", gzip.compress(BODY) + b"rubbish"),
    "rubbish behind deflate": (b"deflate", zlib.compress(BODY) + b"rubbish"),
    "truncated deflate": (b"deflate", zlib.compress(BODY)[:-6]),
    "an empty gzip": (b"gzip", b""),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_an_encoding_that_is_broken_or_unknown_is_a_bad_body(server: Serving, case: str) -> None:
    encoding, sent = BROKEN[case]
    status, _, got = await answer(server, chat(server, sent, b"Content-Encoding: " + encoding))
    assert (status, got["error"]["code"]) == (400, "bad_body")


async def test_the_connection_serves_on_after_a_compressed_bomb(server: Serving) -> None:
    bomb = gzip.compress(b" " * 2**26)
    status, _, got = await answer(server, chat(server, bomb, b"Content-Encoding: gzip"))
    assert (status, got["error"]["code"]) == (413, "too_large")


async def test_connections_without_a_request_are_closed(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0)
    for start in (b"", b"GET / HTTP/1.1\r\nA: "):
        reader, writer = await connect(server)
        writer.write(start)
        async with asyncio.timeout(30):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def gone(server: Serving, opened: int) -> None:
    """Until the server has no more than `opened` connections."""
    assert server.runner.server is not None
    async with asyncio.timeout(30):
        while len(server.runner.server.connections) > opened:
            await server.services.registry.considered()


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    return await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))  # type: ignore[index]


async def test_a_later_head_that_stalls_is_given_up_and_an_idle_connection_is_not(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [await connect(server) for _ in range(2)]
    async with asyncio.timeout(30):
        for reader, writer in opened:
            writer.write(chat(server, BODY))
            assert json.loads(await whole_answer(reader))["object"] == "chat.completion"
        monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0)
        (stalled, writer), (idle, other) = opened
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        with suppress(ConnectionResetError):
            assert await stalled.read() == b""
        other.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await whole_answer(idle) == b'{"ok":true}'
        for _, each in opened:
            each.close()


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def reads(server: Serving) -> dict[str, list[bytes]]:
    """Requests as the server may come to read them; they end with the last read."""
    with_length = chat(server, BODY)
    in_chunks = chat(server, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + CHUNKS
    whole = {"no body": HEALTH, "a body": with_length, "chunks": in_chunks, "two at once": HEALTH + with_length}
    cuts = {"no body": (2, 9), "a body": (1, 9, len(BODY), len(BODY) + 2), "chunks": (1, 2, 9, len(CHUNKS))}
    found = {name: [sent] for name, sent in whole.items()}
    return found | {
        f"{name}, {cut} bytes later": [whole[name][:-cut], whole[name][-cut:]] for name in cuts for cut in cuts[name]
    }


def connection(server: Serving, writer: asyncio.StreamWriter) -> Any:
    """The server's end."""
    assert server.runner.server is not None
    mine = writer.get_extra_info("sockname")
    return next(each for each in server.runner.server.connections if each.transport.get_extra_info("peername") == mine)


async def test_a_head_that_begins_in_the_read_that_ends_a_request_is_given_up_if_it_stalls(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (*before, last) in reads(server).items():
        for behind in (b"", HEALTH[:25]):
            reader, writer = await connect(server)
            async with asyncio.timeout(30):
                writer.write(HEALTH)
                await whole_answer(reader)
                mine = connection(server, writer)
                for read in before:
                    mine.data_received(read)
                with monkeypatch.context() as patch:
                    patch.setattr(server_module, "HEAD_TIMEOUT_S", 0)
                    mine.data_received(last + behind)
                    assert (mine._head_timer is not None) == bool(behind), name
                    for _ in range(2 if name == "two at once" else 1):
                        await whole_answer(reader)
                    if behind:
                        assert await reader.read() == b"", name
            writer.close()


async def test_a_head_that_stalls_behind_an_answer_does_not_hurt_the_answer(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await connect(server)
    slow = json.dumps({"messages": [{"role": "user", "content": "slow"}], "stream": True}).encode()
    writer.write(chat(server, slow))
    async with asyncio.timeout(30):
        await reader.readuntil(b"data: ")
        monkeypatch.setattr(server_module, "HEAD_TIMEOUT_S", 0.01)
        writer.write(b"GET /healthz HTTP/1.1\r\nHo")
        rest = await reader.read()
    assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0")
    assert rest.count(b'"content":"a"') == 40
    writer.close()


@pytest.mark.parametrize("ends", ["keep-alive", "close"])
async def test_a_reader_of_a_whole_answer_that_does_not_read_is_dropped(
    server: Serving, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(stream_module, "MAX_BEHIND_S", 0.2)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    host, port = server.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    large = json.dumps({"messages": [{"role": "user", "content": "large"}]}).encode()
    await asyncio.get_running_loop().sock_sendall(sock, chat(server, large, b"Connection: " + ends.encode()))
    answered = 'citadel_calls_total{model="m",outcome="ok"} 1.0'
    async with asyncio.timeout(30):
        while answered not in server.services.metrics.render({}, {}).decode():
            await server.services.registry.considered()
    await gone(server, 0)
    sock.close()


async def test_connections_that_stall_cost_nobody_else_anything(server: Serving) -> None:
    """Half a head, half a body, a header every now and then: as many of each as a burst of a scanner brings."""
    starts = (b"", b"GET / HTTP/1.1\r\nA: ", chat(server, BODY)[:-9], CHAT + b"Content-Length: 9\r\n")
    opened = [(await connect(server), start) for _ in range(50) for start in starts]
    for (_, writer), start in opened:
        writer.write(start)
    async with asyncio.timeout(30):
        for round_ in range(10):
            for (_, writer), start in opened:
                if start.endswith(b"\r\n"):
                    writer.write(b"X-%d: y\r\n" % round_)
            async with server.chat() as response:
                assert response.status == 200
    assert server.services.ledger.open_calls == 0
    for (_, writer), _ in opened:
        writer.close()
    await gone(server, 1)


async def test_a_body_that_does_not_come_is_given_up(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "TIMEOUT_S", 0)
    head = chat(server, b"x" * 100)[:-50]
    status, _, got = await answer(server, head)
    assert (status, got["error"]["message"]) == (400, "The body did not come within 0 s")


async def test_waiting_for_a_share_of_the_memory_takes_nothing_of_a_body_s_time() -> None:
    shares, told = body_module._ByteBudget(10), asyncio.Queue[asyncio.Timeout]()

    async def upload(size: int) -> float | None:
        async with asyncio.timeout(60) as patience:
            told.put_nowait(patience)
            async with shares.take(size, patience):
                return patience.when()

    async with asyncio.timeout(60) as mine, shares.take(6, mine):
        assert mine.when() is not None
        second = asyncio.create_task(upload(5))
        assert (await told.get()).when() is None
    assert await second is not None
    assert shares._free == 10


async def test_a_client_that_closes_its_half_counts_as_gone(server: Serving) -> None:
    reader, writer = await connect(server)
    writer.write(chat(server, BODY)[:-1])
    writer.write_eof()
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_a_path_that_ends_in_a_slash_lists_the_models(server: Serving) -> None:
    async with server.session.get(server.url + "/v1/models/") as response:
        assert (response.status, (await response.json())["data"][0]["id"]) == (200, "m")
