"""Requests that nobody should send, by the thousand: no 500, no hang, no crash, no key or prompt in the log."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    ignored_auth,
    negative_data_rejection,
    positive_data_acceptance,
    unsupported_method,
)

from citadel import app
from citadel.errors import NotFound
from citadel.http.openapi import document
from tests.conftest import Serving, make_config, serving, write_script
from tests.http import hostile

AT_ONCE = 16
PER_OPERATION = 10
"""Requests of each kind, right and wrong, that are made of one operation of the document."""
NOT_OURS = [positive_data_acceptance, negative_data_rejection, ignored_auth, unsupported_method]
"""A body has rules that no schema states, and fields that nobody knows are ignored; keys and methods are tested above
and in test_citadel_rows.py, route by route."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    lines = [{"pieces": ["<think>a</think>", "b", " c"]}]
    source = write_script(tmp_path / "script.jsonl", lines)
    model = {"engine": "replay", "source": source, "context_length": 3000}
    waits = {"wait_s": 0.1, "wait_stream_s": 0.1, "wait_max_s": 0.1, "drain_s": 0}
    config = make_config(tmp_path, {"m": model, "a/b": model}, server=waits, gpu={"lease_expiry_s": 0.1})
    async with serving(config, scopes=["llm", "gpu", "admin"]) as running:
        yield running


async def answer_to(server: Serving, sent: bytes) -> tuple[int | None, bytes]:
    """Status and body of the first answer that is none of the interim ones; None where the connection was closed.

    Of a stream the body is empty: it is left at once.
    """
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        async with asyncio.timeout(60):
            writer.write(sent)
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
                continue
            assert b"\r\nX-Request-Id: " in head, head
            length = re.search(rb"\r\nContent-Length: (\d+)", head)
            whole = length is not None and not sent.startswith(b"HEAD ")
            body = await reader.readexactly(int(length[1])) if length is not None and whole else b""
            return int(head.split()[1]), body
    except (asyncio.IncompleteReadError, ConnectionError):
        return None, b""
    finally:
        writer.close()


def told_nothing(body: bytes, key: str, where: str) -> None:
    """No error repeats a key or a prompt. What stands where a model's name belongs is repeated, without a key in it."""
    for secret in (key[13:], hostile.STRANGER[13:]):
        assert secret.encode() not in body, where
    assert hostile.PROMPT.encode() not in body or b'"model_not_found"' in body, (where, body)


async def attack(server: Serving, seeds: range) -> dict[int | None, int]:
    """How often each status was answered. A body that is shorter than it says is ended by our leaving."""
    keys = (server.key, server.key, server.key, server.key, hostile.STRANGER, "hlk_x", "", server.key[:-1])
    found: dict[int | None, int] = {}
    gate = server.services.gate
    todo = iter(seeds)

    async def worker() -> None:
        for seed in todo:
            made = hostile.request(seed, app.ROUTES, keys)
            status, body = await answer_to(server, made.raw())
            found[status] = found.get(status, 0) + 1
            assert status not in (500, 501), f"seed {seed}: {made}"
            if status is not None and status >= 400:
                told_nothing(body, server.key, f"seed {seed}: {made}")
            gate.open()  # one of them may have taken the server offline

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_ONCE):
            workers.create_task(worker())
    return found


async def check_nothing_is_left(server: Serving, said: io.StringIO) -> None:
    lines = said.getvalue()
    assert '"event": "request"' in lines
    for secret in (server.key, server.key[13:], hostile.STRANGER, hostile.STRANGER[13:], hostile.PROMPT):
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


def attack_by_the_document(url: str, key: str) -> set[str]:
    """Ask with what schemathesis makes of our document, right and wrong, and hold the answers against it.

    The status, the type of the content, the headers and the body must be those that the document has. Returns which
    operations were asked. The stream of the status never ends, so it is left out.
    """
    asked: set[str] = set()
    headers = {"Authorization": f"Bearer {key}"}
    for found in schemathesis.openapi.from_dict(document(app.ROUTES)).get_all_operations():
        operation = found.ok()
        if operation.path == "/admin/status/stream":
            continue
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body and not operation.query:
                continue  # there is nothing that could be wrong

            @settings(
                max_examples=PER_OPERATION,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                response = case.call(base_url=url, headers=headers, timeout=60)
                case.validate_response(response, excluded_checks=NOT_OURS)

            ask()
        asked.add(operation.label)
        requests.post(f"{url}/admin/offline", json={"offline": False}, headers=headers, timeout=60)
    return asked


@pytest.mark.timeout(300)
async def test_nothing_that_the_document_leads_to_breaks_the_server(server: Serving, said: io.StringIO) -> None:
    asked = await asyncio.to_thread(attack_by_the_document, server.url, server.key)
    assert len(asked) == len(app.ROUTES) - 1
    await check_nothing_is_left(server, said)


def test_the_generator_makes_the_same_of_the_same_seed() -> None:
    made = [hostile.request(7, app.ROUTES, (hostile.STRANGER,)) for _ in range(2)]
    assert made[0] == made[1]
    assert {hostile.request(seed, app.ROUTES, (hostile.STRANGER,)).path.partition("?")[0] for seed in range(2000)} >= {
        path for path in document(app.ROUTES)["paths"] if "{" not in path
    }
