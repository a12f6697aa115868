"""Errors over HTTP, each to the field, the header and the type."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from citadel.http import calls
from tests.conftest import Serving, make_config, serving, write_script

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
LIMIT = 33_554_432


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    models = {
        "m": {"engine": "replay", "source": source, "context_length": 100, "slots": 2},
        "other": {"engine": "replay", "source": source},
    }
    async with serving(make_config(tmp_path, models)) as running:
        yield running
        running.services.registry.check_integrity()


async def post(server: Serving, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any], Any]:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    whole = io.BytesIO(data)  # its length is known, and it is sent without a copy
    async with server.session.post(server.url + CHAT, data=whole, headers={**JSON, **headers}) as response:
        assert response.headers["Content-Type"] == "application/json"
        assert re.fullmatch(r"[0-9a-f]{16,64}", response.headers["X-Request-Id"])
        return response.status, await response.json(), response.headers


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", "at line 1, column 2"),
        (b'{"a": \n nope}', "line 2"),
        (b"[1]", "the body is JSON, but no object"),
        (b'"text"', "the body is JSON, but no object"),
        (b"", "line 1, column 1"),
        (b'{"temperature": NaN}', "line 1"),
        (b'{"temperature": -Infinity}', "line 1"),
        (b'{"a": "\\ud800"}', "line 1"),
        (b'{"a": "\xff"}', "line 1"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 200 deep"),
    ],
)
async def test_a_body_that_is_no_json_object_says_where(server: Serving, raw: bytes, reason: str) -> None:
    status, got, _ = await post(server, raw)
    assert reason in got["error"].pop("reason")
    assert (status, got) == (
        400,
        {
            "error": {
                "message": "The body is not a JSON object",
                "type": "invalid_request_error",
                "code": "invalid_json",
            }
        },
    )


async def test_of_duplicate_keys_the_last_wins(server: Serving) -> None:
    raw = b'{"model": "none", "model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    assert (await post(server, raw))[0] == 200


async def test_nesting_up_to_the_bound_is_taken(server: Serving) -> None:
    raw = json.dumps(body()).encode()[:-1] + b', "x": ' + b"[" * 198 + b"]" * 198 + b"}"
    assert (await post(server, raw))[0] == 200


BAD_FIELDS = {
    "model": (body(model=5), "model: it must be a string"),
    "messages": ({}, "messages: field required"),
    "messages[0].role": ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role: input should be"),
    "messages[1].content": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]},
        "messages[1].content: input should be",
    ),
    "messages[0].content[1]": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
        "messages[0].content[1]: not supported: only text parts are, not 'image_url'",
    ),
    "messages[0].tool_call_id": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id: a tool message must say which call it answers",
    ),
    "max_tokens": (body(max_tokens=0), "max_tokens: input should be greater than or equal to 1"),
    "max_tokens ": (body(temperature=9, logprobs=5, max_tokens=0), "max_tokens: input should be greater"),
    "max_completion_tokens": (
        body(max_completion_tokens="5"),
        "max_completion_tokens: input should be a valid integer",
    ),
    "temperature": (body(temperature=2.5), "temperature: input should be less than or equal to 2"),
    "top_p": (body(top_p=0), "top_p: input should be greater than 0"),
    "n": (body(n=9), "n: input should be less than or equal to 8"),
    "stop": (body(stop=["a", "b", "c", "d", "e"]), "stop: at most 4 sequences, not 5"),
    "stream": (body(stream="yes"), "stream: input should be a valid boolean"),
    "top_logprobs": (body(top_logprobs=3), "top_logprobs: it needs logprobs: true"),
    "logprobs": (body(logprobs=True), "The replay engine has no logprobs"),
    "logit_bias": (body(logit_bias={"x": 1}), "logit_bias: 'x' is no token id"),
    "min_tokens": (body(min_tokens=9, max_tokens=3), "min_tokens: it is over the output token limit"),
    "tool_choice": (body(tool_choice="required"), "tool_choice: there are no tools to choose from"),
    "tool_choice.function.name": (
        body(
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice={"type": "function", "function": {"name": "g"}},
        ),
        "tool_choice.function.name: there is no tool 'g'",
    ),
    "tools[0].function.name": (
        body(tools=[{"type": "function", "function": {"name": ""}}]),
        "tools[0].function.name: string should have at least 1 character",
    ),
    "response_format.json_schema": (
        body(response_format={"type": "json_schema"}),
        "response_format.json_schema: this field is required",
    ),
    "audio": (body(audio={"voice": "x"}), "audio: not supported: models here answer in text"),
    "modalities": (body(modalities=["text", "audio"]), "modalities: not supported: models here answer in text"),
    "modalities ": (body(modalities=5), "modalities: not supported"),
    "logit_bias ": (body(logit_bias={"1" * 5000: 1}), "logit_bias: '111"),
    "functions": (body(functions=[{"name": "f"}]), "functions: not supported: it was replaced by tools"),
    "guided_json": (body(guided_json={}, guided_regex="x"), "guided_regex: not supported: use response_format"),
    "reasoning_effort": (body(reasoning_effort="huge"), "reasoning_effort: input should be"),
    "chat_template_kwargs": (
        body(chat_template_kwargs={"messages": []}),
        "chat_template_kwargs.messages: the server sets this itself",
    ),
}


@pytest.mark.parametrize("param", BAD_FIELDS)
async def test_a_bad_field_is_named_with_its_reason(server: Serving, param: str) -> None:
    sent, message = BAD_FIELDS[param]
    status, got, _ = await post(server, sent)
    error = got["error"]
    assert (status, error["type"], error["code"]) == (400, "BadRequestError", "BadRequestError")
    assert error["message"].startswith(message)
    assert error["param"] == ("guided_regex" if param == "guided_json" else param.strip())


async def test_more_choices_than_slots_are_refused(server: Serving) -> None:
    _, got, _ = await post(server, body(n=3))
    assert got["error"]["message"] == "n: m has 2 slots, fewer than 3"


async def test_an_unknown_model_is_told_with_those_that_there_are(server: Serving) -> None:
    status, got, _ = await post(server, body(model="nope"))
    assert (status, got) == (
        404,
        {
            "error": {
                "message": "The model 'nope' is not installed",
                "type": "invalid_request_error",
                "code": "model_not_found",
                "model": "nope",
                "available": ["m", "other"],
            }
        },
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_leaves_no_room_has_a_status_streamed_or_not(server: Serving, stream: bool) -> None:
    status, got, _ = await post(server, {"messages": [{"role": "user", "content": "x" * 200}], "stream": stream})
    error = got["error"]
    assert (status, error["type"], error["code"]) == (400, "context_length_exceeded", "context_length_exceeded")
    assert "maximum context length is 100 tokens" in error["message"]


KEY_ERRORS = {
    "no header": (None, "missing_api_key", "No Authorization header"),
    "another scheme": ("Basic x", "invalid_api_key", "The API key is unknown or revoked"),
    "no key of ours": ("Bearer hlk_not_a_key", "invalid_api_key", "The API key is unknown or revoked"),
    "an unknown key": (
        "Bearer hlk_abcdefgh_" + "x" * 43,
        "invalid_api_key",
        "The API key is unknown or revoked",
    ),
}


@pytest.mark.parametrize("case", KEY_ERRORS)
@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
async def test_a_call_without_a_good_key_is_refused(server: Serving, path: str, case: str) -> None:
    header, code, message = KEY_ERRORS[case]
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": header} if header else {}
        method = "GET" if path == "/v1/models" else "POST"
        async with session.request(method, server.url + path, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            expected = {"message": message, "type": "invalid_request_error", "code": code}
            assert await response.json() == {"error": expected}


async def test_a_key_with_the_right_id_and_a_wrong_secret_is_refused(server: Serving) -> None:
    wrong = server.key[:-1] + ("a" if server.key[-1] != "a" else "b")
    status, got, _ = await post(server, body(), Authorization=f"Bearer {wrong}")
    assert (status, got["error"]["code"]) == (401, "invalid_api_key")


async def test_the_scheme_is_not_case_sensitive(server: Serving) -> None:
    assert (await post(server, body(), Authorization=f"bearer {server.key}"))[0] == 200


async def test_a_key_without_the_scope_is_refused_but_may_list_models(tmp_path: Path) -> None:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    config = make_config(tmp_path, {"m": {"engine": "replay", "source": source}})
    async with serving(config, scopes=["gpu"]) as server:
        status, got, _ = await post(server, body())
        message = "The key does not carry the scope llm"
        expected = {"message": message, "type": "invalid_request_error", "code": "insufficient_scope"}
        assert (status, got) == (403, {"error": expected})
        async with server.session.get(server.url + "/v1/models") as response:
            assert response.status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
async def test_another_content_type_is_refused(server: Serving, kind: str) -> None:
    status, got, _ = await post(server, body(), **{"Content-Type": kind})
    assert (status, got["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_content_type_with_parameters_is_taken(server: Serving) -> None:
    assert (await post(server, body(), **{"Content-Type": "application/json; charset=utf-8"}))[0] == 200


@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "", "٣"])
async def test_a_wait_that_is_no_number_is_refused(server: Serving, value: str) -> None:
    status, got, _ = await post(server, body(), **{"X-LLM-Wait": value})
    assert (status, got["error"]["code"], got["error"]["type"]) == (400, "bad_header", "invalid_request_error")


async def test_a_wait_above_the_maximum_counts_as_the_maximum(server: Serving) -> None:
    for digits in (40, 4000):
        assert (await post(server, body(), **{"X-LLM-Wait": "9" * digits}))[0] == 200


def test_a_wait_may_have_leading_zeros() -> None:
    assert calls._asked_wait({"X-LLM-Wait": " 0000000000005 "}, 1800) == 5
    assert calls._asked_wait({"X-LLM-Wait": "9" * 4000}, 1800) == 1800


TOO_LARGE = {
    "error": {
        "message": f"The body is over {LIMIT} bytes",
        "type": "invalid_request_error",
        "code": "too_large",
    }
}


def padded(size: int) -> bytes:
    start = json.dumps(body()).encode()[:-1] + b', "x": "'
    return start + b"x" * (size - len(start) - 2) + b'"}'


async def test_a_body_of_exactly_the_limit_is_taken(server: Serving) -> None:
    assert (await post(server, padded(LIMIT)))[0] == 200


async def test_one_byte_more_is_refused(server: Serving) -> None:
    assert (await post(server, padded(LIMIT + 1)))[:2] == (413, TOO_LARGE)


async def test_a_body_of_unknown_length_is_refused_while_it_is_read(server: Serving) -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        for _ in range(33):
            yield b" " * 2**20

    async with server.session.post(server.url + CHAT, data=chunks(), headers=JSON) as response:
        assert (response.status, await response.json()) == (413, TOO_LARGE)


async def test_a_body_of_wrong_items_is_refused_at_the_first(server: Serving) -> None:
    async with asyncio.timeout(20):
        status, got, _ = await post(server, b'{"messages": [' + b"0," * 1_000_000 + b"0]}")
    assert (status, got["error"]["param"]) == (400, "messages[0]")


async def test_idle_uploads_hold_up_nobody(server: Serving) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.key}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    for _, writer in idle:
        writer.write(head.encode())
        await writer.drain()
    async with asyncio.timeout(20):
        assert (await post(server, body()))[0] == 200
        assert (await post(server, padded(3 * 2**20)))[0] == 200
    for _, writer in idle:
        writer.close()
        await writer.wait_closed()


async def test_an_unknown_encoding_is_a_bad_body(server: Serving) -> None:
    status, got, _ = await post(server, body(), **{"Content-Encoding": "rot13"})
    assert (status, got["error"]["code"]) == (400, "bad_body")


async def test_a_compressed_body_counts_decompressed(server: Serving) -> None:
    small = gzip.compress(json.dumps(body()).encode())
    assert (await post(server, small, **{"Content-Encoding": "gzip"}))[0] == 200
    large = gzip.compress(padded(LIMIT + 1))
    assert (await post(server, large, **{"Content-Encoding": "gzip"}))[:2] == (413, TOO_LARGE)


async def test_a_body_that_is_not_in_its_encoding_is_a_bad_body(server: Serving) -> None:
    status, got, _ = await post(server, b"no gzip at all", **{"Content-Encoding": "gzip"})
    expected = {"message": "The body could not be read", "type": "invalid_request_error", "code": "bad_body"}
    assert (status, got) == (400, {"error": expected})


async def test_a_wrong_method_says_which_are_allowed(server: Serving) -> None:
    async with server.session.get(server.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "OPTIONS, POST"
        error = (await response.json())["error"]
        assert (error["code"], error["type"]) == ("method_not_allowed", "invalid_request_error")


async def test_anything_else_is_not_found_in_the_citadel_format(server: Serving) -> None:
    async with server.session.get(server.url + "/nothing/here") as response:
        assert response.status == 404
        assert await response.json() == {
            "ok": False,
            "error": "not-found",
            "code": "not_found",
            "message": "not found",
        }


async def test_the_order_of_checks_is_the_contracts(server: Serving) -> None:
    """Each request has every fault from one step on; the first of them is the answer."""
    faults = [
        ({"Authorization": "Bearer x"}, "invalid_api_key"),
        ({"Content-Type": "text/plain"}, "unsupported_media_type"),
        ({"X-LLM-Wait": "x"}, "bad_header"),
    ]
    bodies = [(b"{", "invalid_json"), (b'{"model": "nope", "n": 99}', "model_not_found")]
    for index, (_, code) in enumerate(faults):
        headers = {name: value for fault, _ in faults[index:] for name, value in fault.items()}
        assert (await post(server, b"{", **headers))[1]["error"]["code"] == code
    for raw, code in bodies:
        assert (await post(server, raw))[1]["error"]["code"] == code


async def test_a_request_id_is_kept_if_it_is_one(server: Serving) -> None:
    for given, kept in [("0123456789abcdef", True), ("ABCDEF0123456789", False), ("a" * 65, False), ("short", False)]:
        async with server.session.get(server.url + "/healthz", headers={"X-Request-Id": given}) as response:
            assert (response.headers["X-Request-Id"] == given) is kept


async def test_a_preflight_needs_no_key(server: Serving) -> None:
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    async with aiohttp.ClientSession() as session, session.options(server.url + CHAT, headers=headers) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


async def test_health_and_readiness_need_no_key(server: Serving) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/healthz", "/health", "/readyz"):
            async with session.get(server.url + path) as response:
                assert response.status == 200
