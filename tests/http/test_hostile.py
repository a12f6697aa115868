"""Requests that nobody should send, by the thousand: no 500, no hang, no crash, no key or prompt in the log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from citadel import app, logs
from citadel.errors import NotFound
from citadel.http.openapi import document
from tests.conftest import Serving, make_config, serving, write_script
from tests.http import hostile

AT_ONCE = 16
STRANGER = "hlk_abcdefgh_" + "S" * 43


@pytest.fixture
def said() -> Generator[io.StringIO]:
    """Everything that is logged, of any library, from the level debug on."""
    logs.configure(logging.DEBUG)
    root, out = logging.getLogger(), io.StringIO()
    (handler,) = [each for each in root.handlers if type(each) is logging.StreamHandler]
    handler.setStream(out)
    root.setLevel(logging.DEBUG)
    yield out
    logs.configure()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    lines = [{"pieces": ["<think>a</think>", "b", " c"]}]
    source = write_script(tmp_path / "script.jsonl", lines)
    model = {"engine": "replay", "source": source, "context_length": 3000}
    waits = {"wait_s": 0.1, "wait_stream_s": 0.1, "wait_max_s": 0.1, "drain_s": 0}
    config = make_config(tmp_path, {"m": model, "a/b": model}, server=waits, gpu={"lease_expiry_s": 0.1})
    async with serving(config, scopes=["llm", "gpu", "admin"]) as running:
        yield running


async def status_of(server: Serving, sent: bytes) -> int | None:
    """The status of the first answer that is none of the interim ones; None where the connection was closed without."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        async with asyncio.timeout(60):
            writer.write(sent)
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
                continue
            assert b"\r\nX-Request-Id: " in head, head
            return int(head.split()[1])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        writer.close()


async def attack(server: Serving, seeds: range) -> dict[int | None, int]:
    """How often each status was answered. A body that is shorter than it says is ended by our leaving."""
    keys = (server.key, server.key, server.key, server.key, STRANGER, "hlk_x", "", server.key[:-1])
    found: dict[int | None, int] = {}
    gate = server.services.gate
    todo = iter(seeds)

    async def worker() -> None:
        for seed in todo:
            made = hostile.request(seed, app.ROUTES, keys)
            status = await status_of(server, made.raw())
            found[status] = found.get(status, 0) + 1
            assert status not in (500, 501), f"seed {seed}: {made}"
            gate.open()  # one of them may have taken the server offline

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(worker())
    return found


async def check_nothing_is_left(server: Serving, said: io.StringIO) -> None:
    lines = said.getvalue()
    assert '"event": "request"' in lines
    for secret in (server.key, server.key[13:], STRANGER, STRANGER[13:], hostile.PROMPT):
        assert secret not in lines
    for line in lines.splitlines():
        assert json.loads(line).get("level") not in ("error", "critical"), line
    leases = server.services.registry.leases
    for id_ in list(leases._leases):
        with contextlib.suppress(NotFound):  # it has expired just now
            leases.release(id_)  # its owner, one of the requests, has not given it back
    await server.services.registry.considered()
    server.services.registry.check_integrity()


@pytest.mark.timeout(900)
async def test_nothing_that_is_sent_breaks_the_server(server: Serving, said: io.StringIO) -> None:
    found = await attack(server, range(20_000))
    assert {200, 400, 401, 404, 405, 415} <= set(found), found
    await check_nothing_is_left(server, said)


def test_the_generator_makes_the_same_of_the_same_seed() -> None:
    made = [hostile.request(7, app.ROUTES, (STRANGER,)) for _ in range(2)]
    assert made[0] == made[1]
    assert {hostile.request(seed, app.ROUTES, (STRANGER,)).path.partition("?")[0] for seed in range(2000)} >= {
        path for path in document(app.ROUTES)["paths"] if "{" not in path
    }
