"""Chat completions over HTTP, on recorded output: the shape of the stream, of the answer, and that they agree."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script

SCRIPT = [
    {"when": "think", "pieces": ["<think>", "\nLet me", " see.\n", "</think>", "\n\n", "It is ", "four."]},
    {"when": "opened", "pieces": ["Let me", " see.\n", "</think>", "\n\nFour."], "reasoning_open": True},
    {"when": "cut", "pieces": ["One", " two"], "finish": "length"},
    {"when": "slow", "pieces": ["a", "b", "c", "d"], "delay_ms": 20},
    {"when": "endless", "pieces": ["word "] * 10_000, "delay_ms": 5},
    {"when": "one piece", "pieces": ['hello STOP <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>']},
    {"when": "fails", "pieces": ["a", "b"], "fail": "error", "after": 1},
    {"when": "unicode", "pieces": ["Grüße", " aus ", "Tromsø 🦊"]},
    {"pieces": ["Hello", ", ", "world", "."]},
]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", SCRIPT)
    models = {"m": {"engine": "replay", "source": source, "aliases": ("org/other-name",), "slots": 4}}
    async with serving(make_config(tmp_path, models)) as running:
        yield running
        running.services.registry.check_integrity()


async def answer(server: Serving, text: str = "hi", **fields: Any) -> dict[str, Any]:
    async with server.chat(text, **fields) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["Cache-Control"] == "no-store"
        return await response.json()


async def stream(server: Serving, text: str = "hi", **fields: Any) -> list[dict[str, Any]]:
    async with server.chat(text, stream=True, **fields) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        data, _ = await events_of(response)
        return data


def folded(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client that joins the deltas ends up with, per choice."""
    out: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            into = out.setdefault(choice["index"], {"content": "", "reasoning": None, "finish_reason": None})
            into["content"] += choice["delta"].get("content", "")
            if "reasoning" in choice["delta"]:
                into["reasoning"] = (into["reasoning"] or "") + choice["delta"]["reasoning"]
            into["finish_reason"] = choice["finish_reason"] or into["finish_reason"]
    return out


async def test_an_answer_has_every_field_of_the_contract(server: Serving) -> None:
    got = await answer(server)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{16}", got.pop("id"))
    assert isinstance(got.pop("created"), int)
    assert re.fullmatch(r"replay-1-[0-9a-f]{8}", got.pop("system_fingerprint"))
    message = {"role": "assistant", "content": "Hello, world.", "reasoning": None, "reasoning_content": None}
    prompt_tokens = got["usage"].pop("prompt_tokens")
    assert got["usage"].pop("total_tokens") == prompt_tokens + 4
    assert got == {
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_the_stream_is_a_role_then_deltas_then_a_reason(server: Serving) -> None:
    chunks = await stream(server)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:-1] == [{"content": text} for text in ("Hello", ", ", "world", ".")]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_usage_chunk_comes_last_when_asked_for(server: Serving) -> None:
    chunks = await stream(server, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_continuous_usage_counts_up(server: Serving) -> None:
    chunks = await stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 4, 4]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


@pytest.mark.parametrize("text", ["hi", "think", "opened", "cut", "unicode"])
@pytest.mark.parametrize("fields", [{}, {"stop": ["see", "o"]}, {"max_tokens": 2}, {"n": 3}])
async def test_the_stream_and_the_answer_say_the_same(server: Serving, text: str, fields: dict[str, Any]) -> None:
    whole = await answer(server, text, **fields)
    parts = folded(await stream(server, text, **fields))
    assert len(whole["choices"]) == len(parts)
    for choice in whole["choices"]:
        message = choice["message"]
        expected = {"content": message["content"], "reasoning": message["reasoning"]}
        assert parts[choice["index"]] == {**expected, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize(("text", "tokens"), [("think", 3), ("opened", 2)])
async def test_reasoning_is_told_apart_under_both_names(server: Serving, text: str, tokens: int) -> None:
    got = await answer(server, text)
    message = got["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me see."
    assert message["content"] in ("It is four.", "Four.")
    assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] == tokens


async def test_a_stop_string_across_pieces_ends_the_answer_and_is_not_shown(server: Serving) -> None:
    got = await answer(server, stop=["o, w", "never"])
    assert got["choices"][0]["message"]["content"] == "Hell"
    assert got["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_in_the_reasoning_does_not_count(server: Serving) -> None:
    got = await answer(server, "think", stop="see")
    assert got["choices"][0]["message"]["content"] == "It is four."


async def test_nothing_behind_a_stop_string_is_sent_also_from_the_same_piece(server: Serving) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    got = await answer(server, "one piece", tools=[tool], stop=["STOP"])
    assert got["choices"][0]["message"]["content"] == "hello "
    assert "tool_calls" not in got["choices"][0]["message"]
    assert got["choices"][0]["finish_reason"] == "stop"


async def test_what_could_have_begun_a_stop_string_is_shown_at_the_end(server: Serving) -> None:
    got = await answer(server, stop=".never")
    assert got["choices"][0]["message"]["content"] == "Hello, world."


async def test_the_token_limit_ends_with_length(server: Serving) -> None:
    got = await answer(server, max_tokens=4, max_completion_tokens=2)
    assert got["choices"][0]["message"]["content"] == "Hello, "
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["completion_tokens"] == 2


async def test_several_choices_are_one_call(server: Serving) -> None:
    one, three = await answer(server), await answer(server, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


async def test_an_alias_is_echoed(server: Serving) -> None:
    assert (await answer(server, model="org/other-name"))["model"] == "org/other-name"


async def test_the_default_model_answers_without_a_name(server: Serving) -> None:
    async with server.session.post(
        f"{server.url}/v1/chat/completions", json={"model": None, "messages": [{"role": "user", "content": "hi"}]}
    ) as response:
        assert (await response.json())["model"] == "m"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
        {"role": "assistant", "content": "x", "reasoning": "because", "name": "me"},
    ],
)  # fmt: skip
async def test_messages_are_taken_as_clients_send_them(server: Serving, message: dict[str, Any]) -> None:
    got = await answer(server, messages=[message, {"role": "user", "content": "hi"}])
    assert got["choices"][0]["message"]["content"] == "Hello, world."


async def test_fields_without_effect_and_unknown_ones_are_accepted(server: Serving) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": {"x": 1}}
    got = await answer(server, stop=None, tools=[], seed=7, logit_bias=None, no_such_field=[1], **fields)
    assert got["choices"][0]["message"]["content"] == "Hello, world."


async def test_a_client_that_leaves_in_mid_stream_frees_its_slot(server: Serving) -> None:
    async with server.chat("endless", stream=True) as response:
        await first_event(response)
        assert server.services.registry.status("m").running == 1
    async with asyncio.timeout(10):
        while server.services.registry.status("m").running:
            await asyncio.wait({asyncio.ensure_future(answer(server))})


@pytest.mark.parametrize(
    ("bytes_behind", "seconds_behind"),
    [(4 * 2**20, 60), (2**40, 0.5)],
)
async def test_a_reader_that_does_not_read_is_dropped_and_frees_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_behind: int, seconds_behind: float
) -> None:
    monkeypatch.setattr("citadel.http.stream.MAX_BEHIND_BYTES", bytes_behind)
    monkeypatch.setattr("citadel.http.stream.MAX_BEHIND_S", seconds_behind)
    flood = write_script(tmp_path / "flood.jsonl", [{"pieces": ["x" * 100_000] * 400, "delay_ms": 1}])
    async with serving(make_config(tmp_path, {"m": {"engine": "replay", "source": flood}})) as server:
        async with server.chat(stream=True) as response:
            await first_event(response)
            async with asyncio.timeout(60):
                while server.services.registry.status("m").running:
                    await server.services.registry.considered()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        server.services.registry.check_integrity()


async def test_an_error_in_mid_stream_is_an_event_and_then_done(server: Serving) -> None:
    chunks = await stream(server, "fails")
    assert chunks[-1] == {
        "error": {"message": "The replay script has an error here", "type": "edge_error", "code": "edge_error"}
    }
    assert chunks[-2]["choices"][0]["delta"] == {"content": "a"}


async def test_calls_beyond_the_slots_wait_and_are_answered(server: Serving) -> None:
    answers = await asyncio.gather(*(answer(server, "slow") for _ in range(12)))
    assert {got["choices"][0]["message"]["content"] for got in answers} == {"abcd"}


async def test_a_stream_that_waits_for_a_slot_says_so(server: Serving) -> None:
    async with server.chat("endless", stream=True, n=4) as busy:
        await first_event(busy)
        async with server.chat("hi", stream=True) as response:
            assert await response.content.readline() == b": waiting for a slot\n"
            busy.close()
            data, _ = await events_of(response)
            assert folded(data)[0]["content"] == "Hello, world."
