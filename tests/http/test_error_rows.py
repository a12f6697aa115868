"""Every row of the error table, over HTTP, streamed and not: status, type, code, fields and headers; and none missing.

A scenario brings one error about. Where a stream has sent its headers before, the error is an event, else it has its
status; `IN_BAND` names the first kind.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from citadel import errors
from citadel.errors import TABLE, Conflict, MethodNotImplemented, NotFound, Row
from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script
from tests.http.hostile import PROMPT, STRANGER

LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "error", "pieces": ["a", "b"], "fail": "error", "after": 1},
    {"when": "die", "pieces": ["a", "b"], "fail": "die", "after": 1},
    {"pieces": ["ok"]},
]
ROWS = {row.code: row for row in TABLE.values()}
IN_BAND = {"engine_restarted", "edge_error"}


@dataclass
class Told:
    """How the error came: with a status and headers of its own, or as the last event of a stream."""

    status: int
    headers: Any
    error: dict[str, Any]
    in_stream: bool


@dataclass
class Case:
    """A server, and what is kept open beside the call that fails."""

    server: Serving
    stack: AsyncExitStack
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def open_stream(self, text: str = "endless", **fields: Any) -> aiohttp.ClientResponse:
        response = await self.stack.enter_async_context(self.server.chat(text, stream=True, **fields))
        self.stack.callback(response.close)
        await first_event(response)
        return response

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        async with self.server.session.request(method, f"{self.server.url}/admin{path}", json=body) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    async def key(self, **fields: Any) -> None:
        """Call with a key of these limits from here on."""
        made = await self.admin("POST", "/keys", {"member": "ann", "scopes": ["llm"], **fields})
        self.headers["Authorization"] = f"Bearer {made['key']}"

    async def ask(self, stream: bool, text: str = "hi", *, raw: bytes | None = None, **fields: Any) -> Told:
        body = {"messages": [{"role": "user", "content": f"{text} {PROMPT}"}], "stream": stream, **fields}
        headers = {"Content-Type": "application/json", **self.headers}
        data = json.dumps(body).encode() if raw is None else raw
        url = f"{self.server.url}/v1/chat/completions"
        async with self.server.session.post(url, data=data, headers=headers) as response:
            if response.content_type == "text/event-stream":
                events, _ = await events_of(response)
                return Told(response.status, response.headers, events[-1]["error"], in_stream=True)
            return Told(response.status, response.headers, (await response.json())["error"], in_stream=False)


Scenario = Callable[[Case, bool], Awaitable[Told]]


async def invalid_json(case: Case, stream: bool) -> Told:
    return await case.ask(stream, raw=b"{")


async def bad_body(case: Case, stream: bool) -> Told:
    case.headers["Content-Encoding"] = "gzip"
    return await case.ask(stream, raw=b"no gzip")


async def bad_header(case: Case, stream: bool) -> Told:
    case.headers["X-LLM-Wait"] = "soon"
    return await case.ask(stream)


async def bad_request(case: Case, stream: bool) -> Told:
    return await case.ask(stream, temperature=9)


async def context_length_exceeded(case: Case, stream: bool) -> Told:
    return await case.ask(stream, "x" * 3000)


async def parallel_unsupported(case: Case, stream: bool) -> Told:
    await case.open_stream(model="one-at-a-time")
    return await case.ask(stream, model="one-at-a-time")


async def too_many_parallel(case: Case, stream: bool) -> Told:
    await case.admin("POST", "/members/tester", {"max_parallel": 2})
    for _ in range(2):
        await case.open_stream()
    return await case.ask(stream)


async def missing_api_key(case: Case, stream: bool) -> Told:
    async with aiohttp.ClientSession() as session:
        url = f"{case.server.url}/v1/chat/completions"
        async with session.post(url, json={"stream": stream}) as response:
            return Told(response.status, response.headers, (await response.json())["error"], in_stream=False)


async def invalid_api_key(case: Case, stream: bool) -> Told:
    case.headers["Authorization"] = f"Bearer {STRANGER}"
    return await case.ask(stream)


async def insufficient_scope(case: Case, stream: bool) -> Told:
    await case.key(scopes=["gpu"])
    return await case.ask(stream)


async def model_not_found(case: Case, stream: bool) -> Told:
    return await case.ask(stream, model="none")


async def method_not_allowed(case: Case, stream: bool) -> Told:
    async with case.server.session.put(f"{case.server.url}/v1/chat/completions") as response:
        return Told(response.status, response.headers, (await response.json())["error"], in_stream=False)


async def too_large(case: Case, stream: bool) -> Told:
    return await case.ask(stream, "x" * 100_000)


async def unsupported_media_type(case: Case, stream: bool) -> Told:
    case.headers["Content-Type"] = "text/plain"
    return await case.ask(stream)


async def daily_limit(case: Case, stream: bool) -> Told:
    await case.key(daily_calls=1)
    with pytest.raises((KeyError, IndexError)):  # the first is answered, so it has no error
        await case.ask(stream)
    return await case.ask(stream)


async def rate_limited(case: Case, stream: bool) -> Told:
    await case.key(calls_per_minute=1)
    with pytest.raises((KeyError, IndexError)):
        await case.ask(stream)
    return await case.ask(stream)


async def daily_tokens(case: Case, stream: bool) -> Told:
    await case.key()
    await case.admin("POST", "/members/ann", {"daily_tokens": 1})
    with pytest.raises((KeyError, IndexError)):
        await case.ask(stream)
    return await case.ask(stream)


async def too_many_streams(case: Case, stream: bool) -> Told:
    await case.admin("POST", "/members/tester", {"open_per_member": 1})
    await case.open_stream()
    return await case.ask(stream)


async def device_busy(case: Case, stream: bool) -> Told:
    for _ in range(3):
        await case.open_stream()
    return await case.ask(stream)


async def internal(case: Case, stream: bool) -> Told:
    def fault(*_: Any) -> None:
        raise ZeroDivisionError("a fault that the test puts in")

    case.stack.enter_context(pytest.MonkeyPatch.context()).setattr(case.server.services.registry, "status", fault)
    return await case.ask(stream)


async def engine_restarted(case: Case, stream: bool) -> Told:
    return await case.ask(stream, "die")


async def llm_unavailable(case: Case, stream: bool) -> Told:
    return await case.ask(stream, model="missing")


async def edge_error(case: Case, stream: bool) -> Told:
    return await case.ask(stream, "error")


async def model_loading(case: Case, stream: bool) -> Told:
    case.headers["X-LLM-Wait"] = "0"
    return await case.ask(stream, model="slow and small")


async def queued(case: Case, stream: bool) -> Told:
    await case.open_stream()
    case.headers["X-LLM-Wait"] = "0"
    return await case.ask(stream, model="slow", messages=[{"role": "user", "content": "hi"}])


async def gpu_busy(case: Case, stream: bool) -> Told:
    leases = case.server.services.registry.leases
    lease = leases.ask("image", None)
    case.stack.callback(leases.release, lease)
    return await case.ask(stream, model="slow")


async def insufficient_memory(case: Case, stream: bool) -> Told:
    return await case.ask(stream, model="huge")


async def device_offline(case: Case, stream: bool) -> Told:
    await case.admin("POST", "/offline", {"offline": True})
    return await case.ask(stream)


SCENARIOS: dict[str, Scenario] = {
    "invalid_json": invalid_json,
    "bad_body": bad_body,
    "bad_header": bad_header,
    "BadRequestError": bad_request,
    "context_length_exceeded": context_length_exceeded,
    "parallel_unsupported": parallel_unsupported,
    "too_many_parallel": too_many_parallel,
    "missing_api_key": missing_api_key,
    "invalid_api_key": invalid_api_key,
    "insufficient_scope": insufficient_scope,
    "model_not_found": model_not_found,
    "method_not_allowed": method_not_allowed,
    "too_large": too_large,
    "unsupported_media_type": unsupported_media_type,
    "daily_limit": daily_limit,
    "rate_limited": rate_limited,
    "daily_tokens": daily_tokens,
    "too_many_streams": too_many_streams,
    "internal": internal,
    "engine_restarted": engine_restarted,
    "llm-unavailable": llm_unavailable,
    "edge_error": edge_error,
    "model_loading": model_loading,
    "queued": queued,
    "gpu-busy": gpu_busy,
    "insufficient_memory": insufficient_memory,
    "device_offline": device_offline,
    "device_busy": device_busy,
}


def test_no_row_is_missing() -> None:
    others = {TABLE[kind].code for kind in (NotFound, Conflict, MethodNotImplemented)}
    assert set(SCENARIOS) == set(ROWS) - others, "what is left is no LLM route's; test_citadel_rows.py has it"


@asynccontextmanager
async def open_case(folder: Path, code: str) -> AsyncGenerator[Case]:
    source = write_script(folder / "script.jsonl", LINES)
    model = {"engine": "replay", "source": source, "memory_gb": 1, "context_length": 2000}
    models = {
        "m": model,
        "one-at-a-time": model | {"max_parallel": 1},
        "slow": model | {"replay": {"load_s": 1000}},
        "slow and small": model | {"replay": {"load_s": 1000}, "memory_gb": 0.3},
        "huge": model | {"memory_gb": 100},
        "missing": {"engine": "replay", "source": "no-such-file.jsonl"},
    }
    limits = {"open_calls": 3} if code == "device_busy" else {}
    gpu = {"ram_limit_gb": 1.5, "busy_after_s": 0.1}
    config = make_config(folder, models, gpu=gpu, limits=limits, server={"max_body_bytes": 50_000, "drain_s": 0.1})
    async with serving(config) as server, AsyncExitStack() as stack:
        async with server.chat() as response:  # the model is loaded, so that nothing else waits for it
            assert response.status == 200
        yield Case(server, stack)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", SCENARIOS)
async def test_the_row_is_answered_as_the_table_says(
    tmp_path: Path, code: str, stream: bool, said: io.StringIO
) -> None:
    row = ROWS[code]
    async with open_case(tmp_path, code) as case, asyncio.timeout(30):
        told = await SCENARIOS[code](case, stream)
        await check_nothing_is_told(case, told, said)
    assert told.in_stream is (stream and code in IN_BAND | ({"gpu-busy"} if stream else set()))
    assert told.error["type"] == row.type
    assert told.error["code"] == (row.stream_code if told.in_stream and row.stream_code else row.code)
    assert isinstance(told.error["message"], str)
    assert set(told.error) == {"message", "type", "code", *row.fields}
    if told.in_stream:
        assert told.status == 200
    else:
        assert told.status == row.status
        check_headers(told, row)


async def check_nothing_is_told(case: Case, told: Told, said: io.StringIO) -> None:
    """Neither the error, nor what is logged at the level debug, nor the metrics have a key or a prompt in them."""
    async with case.server.session.get(f"{case.server.url}/metrics") as response:
        metrics = await response.text()
    secrets = [key.rpartition("_")[2] for key in (case.server.key, case.headers.get("Authorization", STRANGER))]
    for where in (json.dumps(told.error), str(told.headers), said.getvalue(), metrics):
        for secret in (PROMPT, *secrets):
            assert secret not in where
    assert '"event": "request"' in said.getvalue()


def check_headers(told: Told, row: Row) -> None:
    retry = told.headers.get("Retry-After")
    assert (retry is not None) is (row.status in (429, 503))
    if "retry_after_s" in told.error:
        assert str(told.error["retry_after_s"]) == retry
    elif row.retry_s is not None:
        assert retry == str(row.retry_s)
    if retry is not None and row.should_retry:
        assert int(told.headers["retry-after-ms"]) == min(int(retry) * 1000, errors.MAX_RETRY_AFTER_MS)
    assert told.headers.get("x-should-retry") == (None if row.should_retry else "false")
    assert ("WWW-Authenticate" in told.headers) is (row.status == 401)
    assert ("Allow" in told.headers) is (row.status == 405)
    assert told.headers["Content-Type"] == "application/json"
    assert told.headers["X-Request-Id"]
