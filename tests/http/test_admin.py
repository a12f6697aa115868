"""The owner's routes, and the limits they set as callers see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Serving, first_event, make_config, serving, write_script

LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"pieces": ["three", " small", " pieces"]},
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", LINES)
    model = {"engine": "replay", "source": source, "memory_gb": 1}
    async with serving(make_config(tmp_path, {"m": model, "org/other": model}, server={"drain_s": 0.1})) as running:
        yield running


async def ask(server: Serving, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else None
    async with server.session.request(method, server.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def new_key(server: Serving, **fields: Any) -> str:
    body = {"member": "ann", "scopes": ["llm"], **fields}
    status, made = await ask(server, "POST", "/admin/keys", body)
    assert status == 201, made
    return made["key"]


async def chat(server: Serving, key: str, **fields: Any) -> tuple[int, Any, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with server.chat(headers=headers, **fields) as response:
        return response.status, await response.json(), response.headers


async def state_of(server: Serving, model: str) -> dict[str, Any]:
    _, listed = await ask(server, "GET", "/admin/models")
    return next(entry for entry in listed["models"] if entry["id"] == model)


async def until(server: Serving, model: str, state: str) -> None:
    async with asyncio.timeout(10):
        while (await state_of(server, model))["state"] != state:
            await server.services.registry.considered()


async def test_models_are_loaded_pinned_and_unloaded(server: Serving) -> None:
    for model in ("m", "org/other"):
        assert (await ask(server, "POST", f"/admin/models/{model}/load"))[0] == 202
        await until(server, model, "loaded")
    status, pinned = await ask(server, "POST", "/admin/models/m/pin", {"pinned": True})
    assert (status, pinned["model"]["pinned"]) == (200, True)
    assert (await ask(server, "POST", "/admin/models/org/other/unload"))[0] == 202
    await until(server, "org/other", "stopped")
    assert (await state_of(server, "m"))["state"] == "loaded"


async def test_a_busy_model_is_unloaded_when_its_calls_have_ended(server: Serving) -> None:
    async with server.chat("endless", stream=True) as response:
        await first_event(response)
        await ask(server, "POST", "/admin/models/m/unload")
        entry = await state_of(server, "m")
        assert (entry["state"], entry["draining"], entry["running"]) == ("loaded", True, 1)
        response.close()
    await until(server, "m", "stopped")


async def test_unknown_models_keys_and_members_are_not_found(server: Serving) -> None:
    for method, path in [
        ("POST", "/admin/models/none/load"),
        ("DELETE", "/admin/keys/nosuchid"),
        ("POST", "/admin/members/nobody"),
    ]:
        status, body = await ask(server, method, path, {} if method == "POST" else None)
        assert (status, body) == (404, {"ok": False, "error": "not-found", "code": "not_found", "message": "not found"})


async def test_admin_needs_its_scope(server: Serving) -> None:
    key = await new_key(server)
    for method, path in [("GET", "/admin/keys"), ("POST", "/admin/offline"), ("GET", "/admin/usage")]:
        status, body = await ask(server, method, path, key=key)
        assert (status, body["code"], body["error"], body["ok"]) == (403, "forbidden", "forbidden", False)
    async with server.session.get(server.url + "/admin/keys", headers={"Authorization": "Bearer x"}) as response:
        assert (response.status, (await response.json())["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/admin/keys", {"member": "x", "scopes": ["root"]}, "scopes.0: input should be 'llm', 'gpu' or 'admin'"),
        ("/admin/keys", {"member": "x", "scopes": ["llm"], "limit": 1}, "limit: extra inputs are not permitted"),
        ("/admin/members/tester", {"daily_tokens": 0}, "daily_tokens: input should be greater than or equal to 1"),
    ],
)
async def test_a_bad_body_names_the_field(server: Serving, path: str, body: Any, message: str) -> None:
    status, answer = await ask(server, "POST", path, body)
    assert (status, answer["code"], answer["message"]) == (400, "bad_request", message)


async def test_a_revoked_key_is_refused_from_its_next_call_on(server: Serving) -> None:
    key = await new_key(server)
    assert (await chat(server, key))[0] == 200
    assert (await ask(server, "DELETE", f"/admin/keys/{key.split('_')[1]}"))[0] == 200
    assert (await chat(server, key))[1]["error"]["code"] == "invalid_api_key"


async def test_a_key_sees_and_calls_only_its_models(server: Serving) -> None:
    key = await new_key(server, models=["org/other"])
    _, listed = await ask(server, "GET", "/v1/models", key=key)
    assert [entry["id"] for entry in listed["data"]] == ["org/other"]
    assert (await ask(server, "GET", "/v1/models/m", key=key))[0] == 404
    status, body, _ = await chat(server, key, model="m")
    assert (status, body["error"]["available"]) == (404, ["org/other"])
    assert (await chat(server, key, model="org/other"))[0] == 200


LIMITS = {
    "rate_limited": ({"calls_per_minute": 2}, {"message", "type", "code"}),
    "daily_limit": ({"daily_calls": 2}, {"message", "type", "code", "limit", "used"}),
}


@pytest.mark.parametrize("code", LIMITS)
async def test_a_keys_limit_is_told_with_its_headers(server: Serving, code: str) -> None:
    fields, names = LIMITS[code]
    key = await new_key(server, **fields)
    for left in ("1", "0"):
        status, _, headers = await chat(server, key)
        assert (status, headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (
            200,
            "2",
            left,
        )
    status, body, headers = await chat(server, key)
    assert (status, body["error"]["code"], body["error"]["type"]) == (429, code, "rate_limit_exceeded")
    assert set(body["error"]) == names
    assert int(headers["Retry-After"]) >= 1
    assert ("retry-after-ms" in headers) is (code == "rate_limited")
    assert headers.get("x-should-retry") == ("false" if code == "daily_limit" else None)
    assert "x-ratelimit-limit-tokens" not in headers


async def test_a_members_tokens_end_for_all_the_members_keys(server: Serving) -> None:
    keys = [await new_key(server), await new_key(server)]
    assert (await ask(server, "POST", "/admin/members/ann", {"daily_tokens": 5}))[0] == 200
    _, body, headers = await chat(server, keys[0])
    assert headers["x-ratelimit-limit-tokens"] == "5"
    used = body["usage"]["total_tokens"]
    status, body, headers = await chat(server, keys[1])
    assert (status, body["error"]["code"], body["error"]["limit"], body["error"]["used"]) == (
        429,
        "daily_tokens",
        5,
        used,
    )
    assert headers["x-should-retry"] == "false"
    await ask(server, "POST", "/admin/members/ann", {"daily_tokens": None})
    assert (await chat(server, keys[1]))[0] == 200


async def test_calls_at_once_are_bounded_per_member(server: Serving) -> None:
    key = await new_key(server)
    await ask(server, "POST", "/admin/members/ann", {"open_per_member": 3, "max_parallel": 1})
    headers = {"Authorization": f"Bearer {key}"}
    async with server.chat("endless", stream=True, headers=headers) as first:
        await first_event(first)
        status, body, _ = await chat(server, key)
        assert (status, body["error"]["code"], body["error"]["max_parallel"]) == (400, "parallel_unsupported", 1)
        await ask(server, "POST", "/admin/members/ann", {"open_per_member": 1})
        status, body, answered = await chat(server, key, model="org/other")
        assert (status, body["error"]["code"], body["error"]["limit"]) == (429, "too_many_streams", 1)
        assert answered["Retry-After"] == "5"


async def test_ninety_six_open_calls_are_all_that_are_taken(tmp_path: Path) -> None:
    model = {"engine": "replay", "source": write_script(tmp_path / "script.jsonl", LINES), "slots": 96}
    async with serving(make_config(tmp_path, {"m": model}, limits={"open_per_member": 96})) as server:
        opened = [await server.chat("endless", stream=True) for _ in range(96)]
        for response in opened:
            await first_event(response)
        status, body, headers = await chat(server, server.key)
        assert (status, body["error"]["code"], body["error"]["type"]) == (503, "device_busy", "service_unavailable")
        assert (headers["Retry-After"], headers["retry-after-ms"]) == ("5", "5000")
        for response in opened:
            response.close()


async def test_usage_equals_what_was_answered(server: Serving) -> None:
    key = await new_key(server)
    used = [(await chat(server, key))[1]["usage"] for _ in range(3)]
    _, body = await ask(server, "GET", "/admin/usage")
    (row,) = [row for row in body["usage"] if row["member"] == "ann"]
    assert (row["calls"], row["model"]) == (3, "m")
    assert row["prompt_tokens"] == sum(each["prompt_tokens"] for each in used)
    assert row["completion_tokens"] == sum(each["completion_tokens"] for each in used) == 9
    assert (await ask(server, "GET", "/admin/usage?days=x"))[0] == 400


async def test_a_refused_call_and_a_failed_one_are_given_back(server: Serving) -> None:
    key = await new_key(server, daily_calls=1)
    long = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}}
    assert (await chat(server, key, **long))[0] == 400
    assert (await chat(server, key))[0] == 200
    assert (await chat(server, key))[0] == 429


async def test_the_service_is_taken_offline_and_back(server: Serving) -> None:
    async with server.chat("endless", stream=True) as running:
        await first_event(running)
        assert await ask(server, "POST", "/admin/offline", {"offline": True}) == (200, {"ok": True, "offline": True})
        status, body, _ = await chat(server, server.key)
        assert (status, body["error"]["code"]) == (503, "device_offline")
        assert "device_offline" in await running.text()
    assert await ask(server, "POST", "/admin/offline", {"offline": False}) == (200, {"ok": True, "offline": False})
    assert (await chat(server, server.key))[0] == 200
