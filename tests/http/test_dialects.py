"""The other APIs over recorded output: by the SDKs that speak them, and event by event where those are silent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SCRIPT = [
    {"when": "think", "pieces": ["Let me", " see.\n", "</think>", "\n\n", "It is ", "four."], "reasoning_open": True},
    {"when": "2 + 3", "pieces": ["I will add.\n", CALL[:20], CALL[20:50], CALL[50:]]},
    {"when": "both", "pieces": [CALL, "\n", CALL.replace("2", "7")]},
    {"when": "cut", "pieces": ["One", " two"], "finish": "length"},
    {"when": "endless", "pieces": ["word "] * 10_000, "delay_ms": 5},
    {"when": "fails", "pieces": ["a", "b"], "fail": "error", "after": 1},
    {"pieces": ["Hello", ", ", "world", "."]},
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Adds", "input_schema": SCHEMA}
ADD_FUNCTION: Any = {"type": "function", "name": "add", "description": "Adds", "parameters": SCHEMA, "strict": False}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", SCRIPT)
    models = {"m": {"engine": "replay", "source": source, "aliases": ("claude-opus-4-1",), "slots": 4}}
    async with serving(make_config(tmp_path, models)) as running:
        yield running
        running.services.registry.check_integrity()


@pytest.fixture
async def claude(server: Serving) -> AsyncGenerator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def gpt(server: Serving) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        yield client


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


async def named_events(server: Serving, path: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    async with server.session.post(f"{server.url}{path}", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        found = []
        for block in (await response.text()).strip().split("\n\n"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert all(name == data["type"] for name, data in found)
        return found


def without_id(message: Any) -> dict[str, Any]:
    dumped = message.model_dump(exclude_none=True)
    text = json.dumps({name: value for name, value in dumped.items() if name not in ("created_at", "completed_at")})
    id_ = dumped["id"].partition("_")[2]
    return json.loads(text.replace(id_, "ID"))


# Anthropic's messages


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "reason"),
    [
        ("hi", {}, ["text"], "end_turn"),
        ("think", {"thinking": THINKING, "max_tokens": 2000}, ["thinking", "text"], "end_turn"),
        ("2 + 3", {"tools": [ADD]}, ["text", "tool_use"], "tool_use"),
        ("both", {"tools": [ADD]}, ["tool_use", "text", "tool_use"], "tool_use"),
        ("2 + 3", {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, ["text", "tool_use"], "tool_use"),
        ("cut", {}, ["text"], "max_tokens"),
        ("hi", {"stop_sequences": ["world"]}, ["text"], "stop_sequence"),
    ],
)
async def test_a_message_streamed_is_the_message_whole(
    claude: AsyncAnthropic, text: str, fields: dict[str, Any], kinds: list[str], reason: str
) -> None:
    whole = await claude.messages.create(**asking(text, **fields))
    async with claude.messages.stream(**asking(text, **fields)) as stream:
        streamed = await stream.get_final_message()
    found = [block.type for block in whole.content]
    assert [kind for kind in found if kind != "text"] == [kind for kind in kinds if kind != "text"]
    assert whole.stop_reason == reason
    assert whole.stop_sequence == ("world" if reason == "stop_sequence" else None)
    one, other = without_id(whole), without_id(streamed)
    for message in (one, other):
        for block in message["content"]:
            block.pop("id", None)  # a call's is random
            block.pop("parsed_output", None)
    assert one == other


async def test_the_events_of_a_message_come_in_the_documented_order(server: Serving) -> None:
    events = await named_events(server, "/v1/messages", asking("think", thinking=THINKING))
    # The model was not loaded: pings come before the message, and nowhere else.
    start = [name for name, _ in events].index("message_start")
    assert {name for name, _ in events[:start]} <= {"ping"}
    assert [name for name, _ in events[start:]] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta"]
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1]


async def test_a_loop_of_tools_in_anthropics_words(claude: AsyncAnthropic) -> None:
    first = await claude.messages.create(**asking("2 + 3", tools=[ADD], system="Be brief."))
    call = next(block for block in first.content if block.type == "tool_use")
    assert (call.name, call.input) == ("add", {"a": 2, "b": 3})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
    messages: list[Any] = [
        {"role": "user", "content": "2 + 3"},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    last = await claude.messages.create(model="m", max_tokens=50, messages=messages, tools=[ADD])
    assert [block.model_dump()["text"] for block in last.content] == ["Hello, world."]


async def test_tokens_are_counted_as_a_call_counts_them(claude: AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Grüße"}])
    called = await claude.messages.create(**asking("Grüße"))
    assert counted.input_tokens == called.usage.input_tokens > 0
    assert called.usage.output_tokens == 4


async def test_a_key_comes_by_either_header_on_messages_alone(server: Serving) -> None:
    async with AsyncAnthropic(base_url=server.url, auth_token=server.key, max_retries=0) as bearer:
        assert (await bearer.messages.create(**asking("hi"))).model == "m"
    async with AsyncAnthropic(base_url=server.url, api_key="hlk_wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await stranger.messages.create(**asking("hi"))
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    headers = {"x-api-key": server.key, "Authorization": ""}
    async with server.session.post(f"{server.url}/v1/completions", json={}, headers=headers) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("body", "status", "type_", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "nope"}, 404, "not_found_error", "nope"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
    ],
)
async def test_what_is_wrong_is_told_in_anthropics_shape(
    server: Serving, body: dict[str, Any], status: int, type_: str, says: str
) -> None:
    async with server.session.post(f"{server.url}/v1/messages", json=asking("hi") | body) as response:
        told = await response.json()
        assert (response.status, told["type"], told["error"]["type"]) == (status, "error", type_)
        assert says in told["error"]["message"]
        assert response.headers["request-id"] == response.headers["X-Request-Id"]


async def test_a_method_that_is_wrong_is_told_in_the_routes_own_shape(server: Serving) -> None:
    async with server.session.get(f"{server.url}/v1/messages") as response:
        assert (response.status, (await response.json())["type"]) == (405, "error")


async def test_a_service_that_is_offline_is_overloaded(server: Serving, claude: AsyncAnthropic) -> None:
    server.services.gate.offline = True
    with pytest.raises(anthropic.APIStatusError) as caught:
        await claude.messages.create(**asking("hi"))
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
    assert caught.value.response.headers["Retry-After"] == "60"
    server.services.gate.offline = False


async def test_a_failure_in_mid_message_is_an_error_event(server: Serving, claude: AsyncAnthropic) -> None:
    events = await named_events(server, "/v1/messages", asking("fails"))
    assert (events[-1][0], events[-1][1]["error"]["code"]) == ("error", "edge_error")
    with pytest.raises(anthropic.APIStatusError):
        async with claude.messages.stream(**asking("fails")) as stream:
            await stream.get_final_message()


async def test_a_message_that_waits_is_pinged(tmp_path: Path) -> None:
    source = write_script(tmp_path / "script.jsonl", SCRIPT)
    models = {"m": {"engine": "replay", "source": source, "slots": 1}}
    async with serving(make_config(tmp_path, models, server={"comment_s": 0.01})) as server:
        async with server.chat("endless", stream=True) as busy:
            await first_event(busy)
            url = f"{server.url}/v1/messages"
            async with server.session.post(url, json=asking("hi", stream=True)) as waiting:
                assert await waiting.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
                busy.close()
                assert b"event: message_stop" in await waiting.content.read()


# OpenAI's responses


@pytest.mark.parametrize(
    ("text", "fields", "kinds", "status"),
    [
        ("hi", {}, ["message"], "completed"),
        ("think", {"reasoning": {"effort": "high"}}, ["reasoning", "message"], "completed"),
        ("2 + 3", {"tools": [ADD_FUNCTION]}, ["message", "function_call"], "completed"),
        ("cut", {}, ["message"], "incomplete"),
    ],
)
async def test_a_response_streamed_is_the_response_whole(
    gpt: AsyncOpenAI, text: str, fields: dict[str, Any], kinds: list[str], status: str
) -> None:
    asked: dict[str, Any] = {"model": "m", "input": text, **fields}
    whole = await gpt.responses.create(**asked)
    async with gpt.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    last: Any = events[-1]
    assert last.type == f"response.{status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in whole.output] == kinds
    assert whole.status == status
    one, other = without_id(whole), without_id(last.response)
    for response in (one, other):
        for item in response["output"]:
            item.pop("call_id", None)
            item.pop("parsed_arguments", None)
            for part in item.get("content", []):
                part.pop("parsed", None)
    assert one == other


async def test_a_loop_of_tools_in_responses_passes_its_items_back(gpt: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2 + 3"}]}]
    first = await gpt.responses.create(model="m", input=asked, tools=[ADD_FUNCTION], instructions="Be brief.")
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    asked += [item.model_dump() for item in first.output]
    asked += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
        {"role": "user", "content": "ok"},
    ]
    last = await gpt.responses.create(model="m", input=asked, tools=[ADD_FUNCTION])
    assert last.output_text == "Hello, world."
    assert last.usage is not None
    assert last.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("conversation", "c"),
        ("tools", [{"type": "web_search"}]),
        ("input", [{"type": "item_reference", "id": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("truncation", "auto"),
        ("tool_choice", "required"),
    ],
)
async def test_what_responses_cannot_do_is_refused_by_name(gpt: AsyncOpenAI, field: str, value: Any) -> None:
    asked: dict[str, Any] = {"model": "m", "input": "hi", field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.responses.create(**asked)
    assert str(caught.value.param).startswith(field)


async def test_a_failure_in_mid_response_raises_in_the_sdk(gpt: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIError, match="error here"):
        async for _ in await gpt.responses.create(model="m", input="fails", stream=True):
            pass


# OpenAI's completions


async def test_completions_whole_and_streamed_agree(gpt: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "Once", "n": 2, "echo": True, "max_tokens": 3}
    whole = await gpt.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == ["OnceHello, world"] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 6)
    chunks = [
        chunk
        async for chunk in await gpt.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    ]
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


async def test_a_prompt_is_continued_as_it_is(server: Serving) -> None:
    tokens = [ord(letter) for letter in "think"]
    body = {"model": "m", "prompt": tokens, "max_tokens": 10, "stop": ["four"], "stream": True}
    async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
        chunks, _ = await events_of(response)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Let me see.\n</think>\n\nIt is "
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "x"},
        {"best_of": 2},
        {"echo": True, "logprobs": 1},
        {"logprobs": 21},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": None},
        {"n": 5},
        {"add_special_tokens": True},
    ],
)
async def test_what_completions_cannot_do_is_refused_by_name(server: Serving, fields: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "hi", **fields}
    async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "BadRequestError")
        assert error["param"].split("[")[0] in fields


# Tokens


async def test_tokens_there_and_back(server: Serving) -> None:
    async with server.session.post(
        f"{server.url}/tokenize", json={"prompt": "Grüße", "return_token_strs": True}
    ) as got:
        answer = await got.json()
    assert answer["tokens"] == [ord(letter) for letter in "Grüße"]
    assert (answer["count"], answer["token_strs"], answer["max_model_len"]) == (5, list("Grüße"), 1_000_000)
    async with server.session.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}) as got:
        assert await got.json() == {"prompt": "Grüße"}
    async with server.session.post(f"{server.url}/detokenize", json={"tokens": [0x110000]}) as got:
        assert (got.status, (await got.json())["error"]["param"]) == (400, "tokens")
    assert server.services.registry.status("m").state.value == "stopped"  # nothing was loaded for it


async def test_a_conversation_has_the_tokens_of_its_call(server: Serving) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with server.session.post(f"{server.url}/tokenize", json={"messages": messages}) as got:
        count = (await got.json())["count"]
    async with server.chat("hi") as got:
        assert (await got.json())["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_client_that_goes_frees_its_slot(server: Serving, path: str) -> None:
    body = asking("endless", stream=True, input="endless", prompt="endless")
    body.update({"max_tokens": 5000})
    for _ in range(6):  # more often than there are slots
        async with server.session.post(f"{server.url}{path}", json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
    async with asyncio.timeout(60):
        async with server.chat("hi") as response:
            assert response.status == 200
