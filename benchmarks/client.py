"""The load generator: a process of its own that sends requests and notes when each piece of an answer came.

It speaks HTTP/1.1 on plain sockets, keeps what arrives with its time, and reads it only when the run is over, so that
its own work does not come between a server and its figures. `ceiling` says how many pieces a second it can take; a run
reports how busy it was, and one that kept it busier than `BUSY` says more of it than of the server.

    client = Client()                       the process; `pin` it where a comparison asks for that
    run = client.run(target, bodies, streams=8)          a closed loop: each stream sends when its last is answered
    run = client.run(target, bodies, at=[0.0, 0.4])      an open loop: each request at its own time, whatever is open
"""

from __future__ import annotations

import asyncio
import bisect
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import orjson
import uvloop

from benchmarks.measure import Answer

BUSY: Final = 0.8
ROOT: Final = Path(__file__).parent.parent
_END: Final = b"\r\n0\r\n\r\n"
_TIMEOUT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: `POST path` of a server on this machine. `fields` go into every body."""

    port: int
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Run:
    """`busy`: the share of one core that the client took."""

    answers: list[Answer]
    wall_s: float
    busy: float

    @property
    def pieces(self) -> int:
        return sum(len(answer.arrivals) for answer in self.answers)


class Client:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.client"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid: Final = self._process.pid

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self,
        target: Target,
        bodies: Sequence[Mapping[str, Any]],
        *,
        streams: int | None = None,
        at: Sequence[float] | None = None,
    ) -> Run:
        plan = {"target": asdict(target), "bodies": bodies, "streams": streams, "at": at}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(plan) + b"\n")
        self._process.stdin.flush()
        found = orjson.loads(self._process.stdout.readline())
        answers = [Answer(**{**each, "arrivals": tuple(each["arrivals"])}) for each in found["answers"]]
        return Run(answers, found["wall_s"], found["busy"])


def ceiling(client: Client, streams: int = 64, pieces: int = 500) -> float:
    """Pieces a second that the client takes from a server that only writes prepared ones."""
    command = [sys.executable, "-m", "benchmarks.client", "static", str(pieces)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as static:
        try:
            assert static.stdout is not None
            run = client.run(Target(int(static.stdout.readline())), [{}] * streams, streams=streams)
        finally:
            static.terminate()
    return run.pieces / run.wall_s


# In the client's process.


class _Connection(asyncio.Protocol):
    """One request at a time. `raw` is all that came in answer, `marks` how much of it had come when."""

    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport | None = None
        self._over: asyncio.Future[None] | None = None
        self._forget()

    def _forget(self) -> None:
        self.raw, self.marks = bytearray(), list[tuple[int, float]]()
        self._length: int | None = None
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self.raw += data
        self.marks.append((len(self.raw), time.perf_counter()))
        if not self._chunked and self._length is None:
            self._read_head()
        ended = self.raw.endswith(_END) if self._chunked else len(self.raw) == self._length
        if ended and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _read_head(self) -> None:
        head, separator, _ = bytes(self.raw).partition(b"\r\n\r\n")
        if not separator:
            return
        for line in head.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"transfer-encoding":
                self._chunked = b"chunked" in value
            elif name == b"content-length":
                self._length = len(head) + 4 + int(value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._over is not None and not self._over.done():
            self._over.set_exception(exc or ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> None:
        assert self.transport is not None
        self._forget()
        self._over = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        async with asyncio.timeout(_TIMEOUT_S):
            await self._over


class _Came(NamedTuple):
    """What `read` is to make an answer of."""

    raw: bytes
    marks: Sequence[tuple[int, float]]
    intended: float
    sent: float
    error: str | None


class _Load:
    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._target = Target(**plan["target"])
        self._requests = [_request(self._target, body) for body in plan["bodies"]]
        self._free: list[_Connection] = []
        self._came: dict[int, _Came] = {}
        self._began = 0.0

    async def run(self, streams: int | None, at: Sequence[float] | None) -> None:
        self._began = time.perf_counter()
        if at is None:
            waiting = iter(range(len(self._requests)))
            await asyncio.gather(*(self._stream(waiting) for _ in range(streams or 1)))
        else:
            await asyncio.gather(*(self._at(index, when) for index, when in enumerate(at)))

    def answers(self) -> list[Answer]:
        """To be asked for when the run is over."""
        return [read(*self._came[index]) for index in range(len(self._requests))]

    async def _stream(self, waiting: Iterator[int]) -> None:
        for index in waiting:
            await self._one(index, time.perf_counter() - self._began)

    async def _at(self, index: int, when: float) -> None:
        await asyncio.sleep(self._began + when - time.perf_counter())
        await self._one(index, when)

    async def _one(self, index: int, intended: float) -> None:
        sent = time.perf_counter() - self._began
        error, connection = None, None
        try:
            connection = await self._asked(self._requests[index])
        except (OSError, TimeoutError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        raw, marks = (connection.raw, connection.marks) if connection is not None else (bytearray(), [])
        since = [(offset, when - self._began) for offset, when in marks]
        self._came[index] = _Came(bytes(raw), since, intended, sent, error)
        if connection is not None and connection.transport is not None:
            self._free.append(connection)

    async def _asked(self, request: bytes) -> _Connection:
        """On a connection of an earlier request, if there is one; a server may close that before it reads this one."""
        connection = await self._connected()
        kept = bool(connection.marks)
        try:
            await connection.ask(request)
        except ConnectionError:
            if not kept or connection.marks:
                raise
            return await self._asked(request)
        return connection

    async def _connected(self) -> _Connection:
        while self._free:
            connection = self._free.pop()
            if connection.transport is not None:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._target.port)
        return connection

    def close(self) -> None:
        for connection in self._free:
            if connection.transport is not None:
                connection.transport.close()


def _request(target: Target, body: Mapping[str, Any]) -> bytes:
    data = orjson.dumps({**target.fields, **body})
    headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(data), **target.headers}
    lines = [f"POST {target.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def read(
    raw: bytes, marks: Sequence[tuple[int, float]], intended: float, sent: float, error: str | None = None
) -> Answer:
    """What an HTTP response says, and when. `marks`: how much of `raw` had come, and the time; both grow."""
    ended = marks[-1][1] if marks else sent
    if not raw.startswith(b"HTTP/1.1 200"):
        said = raw.partition(b"\r\n\r\n")[2][:200].decode("utf-8", "replace")
        told = error or f"{raw[9:12].decode() or 'no answer'}: {said}"
        return Answer(intended, sent, (), ended, 0, 0, 0, error=told)
    arrivals, texts, usage, done = list[float](), list[str](), dict[str, Any](), False
    for end, data in _events(raw):
        if data == b"[DONE]":
            done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            error = error or str(event["error"])[:200]
        usage = event.get("usage") or usage
        if (text := _said(event)) is not None:
            arrivals.append(marks[bisect.bisect_left(marks, (end, 0.0))][1])
            texts.append(text)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counted = usage.get("completion_tokens", len(arrivals))
    if not done and error is None:
        error = "the stream ended without [DONE]"
    return Answer(
        intended, sent, tuple(arrivals), ended, usage.get("prompt_tokens", 0), cached, counted, "".join(texts), error
    )


def _events(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The data of each event, and where in `raw` the chunk that ends it ends."""
    at, body, ends = raw.index(b"\r\n\r\n") + 4, bytearray(), list[tuple[int, int]]()
    while (line := raw.find(b"\r\n", at)) > 0 and (size := int(raw[at:line].split(b";")[0], 16)):
        body += raw[line + 2 : line + 2 + size]
        at = line + 2 + size + 2
        ends.append((len(body), line + 2 + size))
    start = 0
    for line in bytes(body).split(b"\n"):
        start += len(line) + 1
        if line.startswith(b"data: "):
            yield ends[bisect.bisect_left(ends, (min(start, len(body)), 0))][1], line[6:].strip()


def _said(event: Mapping[str, Any]) -> str | None:
    """The text of a chunk; None for one that is no piece of the output."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {"content": choice.get("text")}
        if delta.get("tool_calls"):
            return ""
        if text := delta.get("content") or delta.get("reasoning"):
            return text
    return None


async def _run(plan: Mapping[str, Any]) -> dict[str, Any]:
    load = _Load(plan)
    before, began = time.process_time(), time.perf_counter()
    await load.run(plan["streams"], plan["at"])
    wall, cpu = time.perf_counter() - began, time.process_time() - before
    load.close()
    return {"answers": [asdict(answer) for answer in load.answers()], "wall_s": wall, "busy": cpu / wall}


def _work() -> None:
    # Not sys.stdout: where PYTHONUNBUFFERED is set, it drops what a pipe does not take at once.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        for line in sys.stdin.buffer:
            found = uvloop.run(_run(orjson.loads(line)))
            out.write(orjson.dumps(found) + b"\n")
            out.flush()


async def _static(pieces: int) -> None:
    """A server that answers each POST with prepared pieces, each a write of its own."""
    piece = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(pieces):
                writer.write(chunk)
                await asyncio.sleep(0)
            writer.write(done)
            await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["static"]:
        uvloop.run(_static(int(sys.argv[2])))
    else:
        _work()
