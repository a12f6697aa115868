"""A model that thinks and calls tools, over HTTP on both real engines: what an agent sends, and what it gets.

The model is the small one of tests/models; the dialogues are unseen ones, so the right answer to each is known.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import events_of
from tests.models.export import CHECKPOINT, GGUF
from tests.models.generate import Dialogue, unseen
from tests.real.conftest import ENGINES

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RIGHT = 0.9
"""How many answers must be exactly right: somewhat fewer than the model gets, so that what fails is the server."""
RIGHT_LOOPS = 0.8
"""Of whole loops, which have several answers each."""


def answers(wants_calls: bool, count: int, *, thinking: bool | None = None) -> list[tuple[Dialogue, int]]:
    found = [
        (one, at)
        for one in unseen(200)
        for at in one.answers()
        if bool(one.messages[at].tool_calls) is wants_calls
        and thinking in (None, one.messages[at].reasoning is not None)
    ]
    assert len(found) >= count
    return found[:count]


async def ask(client: aiohttp.ClientSession, body: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    """The first choice as `message`, `finish_reason` and `usage`, joined from the chunks of a stream."""
    if not stream:
        async with client.post("/v1/chat/completions", json=body) as response:
            told = await response.json()
            assert response.status == 200, told
            return {**told["choices"][0], "usage": told["usage"]}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post("/v1/chat/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        return joined((await events_of(response))[0])


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": None, "reasoning_content": None}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for choice in (choice for event in events for choice in event["choices"]):
        delta, reason = choice["delta"], choice["finish_reason"] or reason
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = (message[name] or "") + delta[name]
        for fragment in delta.get("tool_calls", ()):
            if "id" in fragment:
                calls[fragment["index"]] = {key: fragment[key] for key in ("id", "type")} | {
                    "function": dict(fragment["function"])
                }
            else:
                calls[fragment["index"]]["function"]["arguments"] += fragment["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    else:
        message["content"] = message["content"] or ""
    return {"message": message, "finish_reason": reason, "usage": events[-1]["usage"]}


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def expected_calls(one: Dialogue, at: int) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in one.messages[at].tool_calls]


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as it must be again: the ids of its calls, and what the prefix cache knew, are new each time."""
    copy = json.loads(json.dumps(answer))
    for call in copy["message"].get("tool_calls", ()):
        del call["id"]
    copy.pop("logprobs", None)
    copy.pop("index", None)
    copy["usage"].pop("prompt_tokens_details")
    return copy


@pytest.mark.parametrize("engine", ENGINES)
async def test_calls_are_the_right_ones_streamed_and_not(client: aiohttp.ClientSession, engine: str) -> None:
    right = 0
    cases = answers(wants_calls=True, count=24)
    for one, at in cases:
        body = {**one.body(at), "model": engine}
        await ask(client, body)  # so that both below find the same prefix computed
        whole, streamed = await ask(client, body), await ask(client, body, stream=True)
        assert without_ids(whole) == without_ids(streamed)
        if calls_of(whole):
            assert whole["finish_reason"] == "tool_calls"
        right += calls_of(whole) == expected_calls(one, at)
    assert right >= RIGHT * len(cases), f"{right} of {len(cases)}"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
async def test_reasoning_is_told_apart_and_counted(client: aiohttp.ClientSession, engine: str, thinking: bool) -> None:
    right = 0
    cases = answers(wants_calls=False, count=16, thinking=thinking)
    told = await asyncio.gather(*(ask(client, {**one.body(at), "model": engine}) for one, at in cases))
    for (one, at), answer in zip(cases, told, strict=True):
        message, counted = answer["message"], answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        if not thinking:
            assert (message["reasoning"], message["reasoning_content"], counted) == (None, None, 0)
        else:
            assert message["reasoning"] == message["reasoning_content"]
            assert 0 < counted < answer["usage"]["completion_tokens"]
            assert counted == reasoning_tokens(one.output(at)) or message["reasoning"] != one.messages[at].reasoning
        right += (message["content"], message["reasoning"]) == (one.messages[at].content, one.messages[at].reasoning)
    assert right >= RIGHT * len(cases), f"{right} of {len(cases)}"


def reasoning_tokens(output: str) -> int:
    """Tokens before the one that closes the reasoning, by the model's own tokenizer."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - heavy, and for this only

    tokens = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return tokens.encode(output, add_special_tokens=False).tokens.index("</think>")


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_agent_loops_over_calls_and_results(client: aiohttp.ClientSession, engine: str) -> None:
    """The client keeps the conversation: each turn is what the server said, and what its tools gave back."""
    loops = [one for one in unseen(200) if len(one.messages) >= 6 and one.messages[1].tool_calls][:16]
    assert len(loops) == 16
    finished = 0
    for one in loops:
        finished += await walk(client, engine, one)
    assert finished >= RIGHT_LOOPS * len(loops), f"{finished} of {len(loops)}"


async def walk(client: aiohttp.ClientSession, engine: str, one: Dialogue) -> bool:
    first = one.answers()[0]
    body = {**one.body(first), "model": engine}
    messages = body["messages"]
    for at, message in enumerate(one.messages[first:], first):
        if message.role == "assistant":
            body["chat_template_kwargs"] = {"enable_thinking": message.reasoning is not None}
            answer = await ask(client, body, stream=True)
            if calls_of(answer) != expected_calls(one, at):
                return False
            messages.append(answer["message"])
            ids = [call["id"] for call in answer["message"].get("tool_calls", [])]
        elif message.role == "tool":
            messages.append({"role": "tool", "tool_call_id": ids.pop(0), "content": message.content})
        else:
            messages.append({"role": message.role, "content": message.content})
    return messages[-1]["content"] == one.messages[-1].content


@pytest.mark.parametrize("engine", ENGINES)
async def test_stop_strings_count_in_content_only(client: aiohttp.ClientSession, engine: str) -> None:
    """Each is chosen from the arguments and the reasoning, where it must not end anything."""
    for one, at in answers(wants_calls=True, count=6, thinking=True):
        stops = ["call", "<parameter", "\n", str(next(iter(expected_calls(one, at)[0][1].values()), "x"))]
        body = {**one.body(at), "model": engine}
        await ask(client, body)
        free, stopped = await ask(client, body), await ask(client, {**body, "stop": stops[:4]})
        assert calls_of(stopped) == calls_of(free)
        assert stopped["message"]["reasoning"] == free["message"]["reasoning"]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_cut_inside_a_call_is_told_and_leaves_valid_json(client: aiohttp.ClientSession, engine: str) -> None:
    (one, at), *_ = answers(wants_calls=True, count=1, thinking=False)
    body = {**one.body(at), "model": engine}
    length = (await ask(client, body))["usage"]["completion_tokens"]
    cut_in_call = 0
    for limit in range(1, length):
        for stream in (False, True):
            answer = await ask(client, {**body, "max_tokens": limit}, stream=stream)
            assert answer["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == limit
            for _, arguments in calls_of(answer):  # which reads them as JSON
                assert isinstance(arguments, dict)
                cut_in_call += 1
    assert cut_in_call > 0


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_call_is_guaranteed_though_the_model_would_not_make_one(
    client: aiohttp.ClientSession, engine: str
) -> None:
    one, at = next((one, at) for one, at in answers(wants_calls=False, count=30, thinking=True) if one.tools)
    body = {**one.body(at), "model": engine, "max_tokens": 300}
    required = await ask(client, {**body, "tool_choice": "required"})
    assert required["finish_reason"] in ("tool_calls", "length")
    assert calls_of(required)
    name = one.tools[0].name
    named = await ask(client, {**body, "tool_choice": {"type": "function", "function": {"name": name}}})
    assert [called for called, _ in calls_of(named)] == [name]
    assert named["finish_reason"] in ("stop", "length")


def test_the_model_is_here() -> None:
    assert Path(GGUF).is_file()
    assert Path(CHECKPOINT, "config.json").is_file()
