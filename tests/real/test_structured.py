"""Calls and answers that a small model, which knows nothing of tools, is held to: on both real engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.conftest import events_of
from tests.real.conftest import MODELS, asking

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ALARM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "time": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
        "days": {"type": "array", "items": {"enum": ["mo", "tu", "we"]}, "maxItems": 3},
        "volume": {"type": "integer", "minimum": 1, "maximum": 10},
    },
    "required": ["time", "volume"],
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
NOTE: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SCHEMAS = {"set_alarm": ALARM, "weather": CITY, "note": NOTE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in ("set_alarm", "weather")
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "alarm", "schema": ALARM, "strict": True}}

TIMES = 50
AT_ONCE = 16


async def told(session: aiohttp.ClientSession, model: str, at: int = 0, **fields: Any) -> dict[str, Any]:
    asked = {"temperature": 1, "max_tokens": 120, "seed": at, "tools": TOOLS, **fields}
    async with session.post(
        "/v1/chat/completions", json=asking(f"Request number {at}.", model=model, **asked)
    ) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]


async def many(session: aiohttp.ClientSession, model: str, times: int, **fields: Any) -> list[dict[str, Any]]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(at: int) -> dict[str, Any]:
        async with room:
            return await told(session, model, at, **fields)

    return await asyncio.gather(*map(one, range(times)))


def valid_calls(choice: dict[str, Any]) -> list[str]:
    calls = choice["message"].get("tool_calls") or []
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("model", MODELS)
async def test_a_required_call_is_made_and_valid_every_time(session: aiohttp.ClientSession, model: str) -> None:
    choices = await many(session, model, TIMES, tool_choice="required", parallel_tool_calls=False)
    assert [len(valid_calls(choice)) for choice in choices] == [1] * TIMES
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    assert {choice["message"]["content"] for choice in choices} == {None}


@pytest.mark.parametrize("model", MODELS)
async def test_a_named_function_is_called_with_valid_arguments_every_time(
    session: aiohttp.ClientSession, model: str
) -> None:
    choices = await many(session, model, TIMES, tool_choice=NAMED)
    assert [valid_calls(choice) for choice in choices] == [["weather"]] * TIMES
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


@pytest.mark.parametrize("model", MODELS)
async def test_several_calls_are_all_valid(session: aiohttp.ClientSession, model: str) -> None:
    for choice in await many(session, model, 8, tool_choice="required", max_tokens=200):
        if choice["finish_reason"] != "length":
            assert valid_calls(choice)


@pytest.mark.parametrize("model", MODELS)
async def test_an_answer_is_in_its_schema(session: aiohttp.ClientSession, model: str) -> None:
    for choice in await many(session, model, 16, tools=[], response_format=ANSWER):
        jsonschema.validate(json.loads(choice["message"]["content"]), ALARM)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("model", MODELS)
async def test_with_tools_an_answer_is_in_its_schema_or_a_call(session: aiohttp.ClientSession, model: str) -> None:
    for choice in await many(session, model, 16, response_format=ANSWER, parallel_tool_calls=False):
        if not valid_calls(choice):
            jsonschema.validate(json.loads(choice["message"]["content"]), ALARM)


@pytest.mark.parametrize("model", MODELS)
async def test_a_call_that_the_token_limit_cuts_has_valid_json(session: aiohttp.ClientSession, model: str) -> None:
    tools = [{"type": "function", "function": {"name": "note", "parameters": NOTE}}]
    for limit in (14, 17, 20, 24):
        choice = await told(session, model, tools=tools, tool_choice="required", max_tokens=limit, seed=limit)
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls") or []:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": ANSWER, "tools": []}, {}])
async def test_streamed_is_not_streamed(session: aiohttp.ClientSession, model: str, fields: dict[str, Any]) -> None:
    asked = asking("Wake me.", model=model, **{"temperature": 0, "max_tokens": 80, "tools": TOOLS, **fields})
    await told(session, model)  # so that both find the same prefix cached
    answers: list[tuple[Any, ...]] = []
    for stream in (False, True, False):
        async with session.post("/v1/chat/completions", json={**asked, "stream": stream}) as response:
            if stream:
                answers.append(folded((await events_of(response))[0]))
            else:
                choice = (await response.json())["choices"][0]
                calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
                told_calls = [(call["name"], call["arguments"]) for call in calls]
                answers.append((choice["message"]["content"], told_calls, choice["finish_reason"]))
    assert answers[1] in (answers[0], answers[2])


def folded(events: list[dict[str, Any]]) -> tuple[Any, ...]:
    content, reason = "", None
    calls: list[list[str]] = []
    for choice in (choice for event in events for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls") or []:
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content or None, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_schema_that_cannot_be_enforced_is_refused_before_the_stream(
    session: aiohttp.ClientSession, model: str, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = asking("Hi", model=model, stream=stream, response_format=wanted)
    async with session.post("/v1/chat/completions", json=asked) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["type"] == error["code"] == "BadRequestError"
    assert error["param"] == "response_format.json_schema.schema.properties.a.uniqueItems"
