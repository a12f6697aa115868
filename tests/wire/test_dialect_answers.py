"""The events of one answer -> each API's JSON, event by event and whole; the whole is what the stream built up."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest

from citadel.errors import EdgeError
from citadel.messages import (
    CallEvent,
    ChatRequest,
    Content,
    Delta,
    Done,
    Embedded,
    EmbedRequest,
    Finished,
    Reasoning,
    SamplingRequest,
    Started,
    TextEvent,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
    Waiting,
)
from citadel.wire.anthropic_answer import MessageAnswer
from citadel.wire.completions import CompletionAnswer
from citadel.wire.dialect import Dialect, Sse
from citadel.wire.embeddings import EmbeddingAnswer
from citadel.wire.response import Answering
from citadel.wire.responses_answer import ResponseAnswer

PROMPT = Usage(prompt=9, cached=4)
TOTAL = Usage(prompt=9, completion=7, cached=4, reasoning=2)


def answer(*events: TextEvent) -> list[CallEvent]:
    said = [Delta(0, event, TOTAL) for event in events]
    return [Waiting("slot", "m"), Started("replay-1-x", PROMPT), *said, Done(TOTAL)]


CALLS = answer(
    Reasoning("Let me"),
    Reasoning(" see."),
    Content("I "),
    Content("add."),
    ToolCallStarted(0, "call_1", "add"),
    ToolCallArguments(0, '{"a":'),
    ToolCallArguments(0, "1}"),
    ToolCallEnded(0),
    ToolCallStarted(1, "call_2", "now"),
    ToolCallArguments(1, "{}"),
    ToolCallEnded(1),
    Finished("tool_calls"),
)


def sent(dialect: Dialect, events: list[CallEvent]) -> list[Sse]:
    return [each for event in events for each in dialect.stream(event)]


# Anthropic's messages


def test_a_message_block_by_block() -> None:
    found = sent(MessageAnswer("msg_1", "alias"), CALLS)
    assert [name for name, _ in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert all(name == data["type"] for name, data in found)
    starts = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    assert found[0][1]["message"]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 0,
    }


def test_a_message_whole() -> None:
    whole = MessageAnswer("msg_1", "alias").whole(CALLS)
    assert whole == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "alias",
        "content": [
            {"type": "thinking", "thinking": "Let me see.", "signature": "msg_1"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished("stop"), "end_turn", None),
        (Finished("stop", stop_sequence="x"), "stop_sequence", "x"),
        (Finished("length"), "max_tokens", None),
        (Finished("tool_calls"), "tool_use", None),
    ],
)
def test_why_a_message_ended(finished: Finished, reason: str, sequence: str | None) -> None:
    whole = MessageAnswer("msg_1", "m").whole(answer(Content("a"), finished))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_a_message_that_was_asked_to_call_ends_in_its_use() -> None:
    events = answer(ToolCallStarted(0, "c", "add"), ToolCallArguments(0, "{}"), ToolCallEnded(0), Finished("stop"))
    assert MessageAnswer("msg_1", "m").whole(events)["stop_reason"] == "tool_use"


# OpenAI's responses

ASKED = ChatRequest("m", "alias", (), sampling=SamplingRequest(temperature=0, max_tokens=50))


def test_a_response_event_by_event() -> None:
    found = sent(ResponseAnswer("1", 1000, ASKED), CALLS)
    text = ("response.output_item.added", "response.content_part.added")
    end = ("response.content_part.done", "response.output_item.done")
    call = ("response.output_item.added", "response.function_call_arguments.delta")
    done = ("response.function_call_arguments.done", "response.output_item.done")
    assert [name for name, _ in found] == [
        *("response.created", "response.in_progress"),
        *(
            *text,
            "response.reasoning_text.delta",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            *end,
        ),
        *(*text, "response.output_text.delta", "response.output_text.delta", "response.output_text.done", *end),
        *(*call, "response.function_call_arguments.delta", *done),
        *(*call, *done),
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    indexes = [data["output_index"] for _, data in found if "output_index" in data]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2, 3}


def test_a_response_whole_is_its_last_event() -> None:
    streamed = sent(ResponseAnswer("1", 1000, ASKED), CALLS)[-1][1]["response"]
    whole = ResponseAnswer("1", 1000, ASKED).whole(CALLS)
    assert whole == streamed
    assert (whole["id"], whole["created_at"], whole["model"], whole["status"]) == ("resp_1", 1000, "alias", "completed")
    assert whole["output"] == [
        {
            "id": "rs_1_0",
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": "Let me see."}],
            "status": "completed",
            "summary": [],
        },
        {
            "id": "msg_1_1",
            "type": "message",
            "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
            "status": "completed",
            "role": "assistant",
        },
        {
            "id": "fc_1_2",
            "type": "function_call",
            "call_id": "call_1",
            "name": "add",
            "arguments": '{"a":1}',
            "status": "completed",
        },
        {
            "id": "fc_1_3",
            "type": "function_call",
            "call_id": "call_2",
            "name": "now",
            "arguments": "{}",
            "status": "completed",
        },
    ]
    assert whole["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }


def test_a_response_that_was_cut_is_incomplete() -> None:
    name, last = sent(ResponseAnswer("1", 1000, ASKED), answer(Content("a"), Finished("length")))[-1]
    assert name == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


# Completions


def completion(*, n: int = 1, logprobs: int | None = None, usage: bool = False, echo: bool = False) -> CompletionAnswer:
    answering = Answering("cmpl-1", 1000, "alias", n, usage, continuous_usage=False, reasoning_content=True)
    sampling = SamplingRequest(logprobs=logprobs)
    return CompletionAnswer(answering, ChatRequest("m", "alias", (), prompt="Once", n=n, echo=echo, sampling=sampling))


def token(text: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(0, text, logprob, top)


LOGGED = answer(
    Content("é", (token("é".encode(), -0.5, token("é".encode(), -0.5), token(b"e", -2.0)),)),
    Content(" a b", (token(b" a", -0.25), token(b" b", -1.0))),
    Finished("length"),
)


def test_logprobs_of_a_completion_lie_side_by_side() -> None:
    whole = completion(logprobs=2).whole(LOGGED)
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "é a b",
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["é", " a", " b"],
                "token_logprobs": [-0.5, -0.25, -1.0],
                "top_logprobs": [{"é": -0.5, "e": -2.0}, {" a": -0.25}, {" b": -1.0}],
                "text_offset": [0, 1, 3],
            },
        }
    ]
    assert whole["object"] == "text_completion"
    assert whole["usage"]["total_tokens"] == 16
    assert completion().whole(LOGGED)["choices"][0]["logprobs"] is None


def test_a_completion_in_chunks() -> None:
    found = [chunk for _, chunk in sent(completion(logprobs=2, usage=True), LOGGED)]
    assert [[choice["text"] for choice in chunk["choices"]] for chunk in found] == [["é"], [" a b"], [""], []]
    assert [chunk["usage"] is None for chunk in found] == [True, True, True, False]
    assert found[1]["choices"][0]["logprobs"]["text_offset"] == [1, 3]
    assert found[2]["choices"][0]["finish_reason"] == "length"


ODD = ('say "hi"\n', "\\", "\0the text\0", "é😀\u2028", " plain")


@pytest.mark.parametrize("usage", [False, True])
def test_a_completions_chunks_that_are_written_by_the_prepared_way_say_what_the_others_do(usage: bool) -> None:
    events = [Started("f", PROMPT), *(Delta(at, Content(text), TOTAL) for text in ODD for at in (1, 0))]
    dialect = completion(n=2, usage=usage)
    said = [dialect.stream(event) for event in events]
    prepared = [json.loads(each.removeprefix(b"data: ")) for each in said if isinstance(each, bytes)]
    built = [chunk for _, chunk in sent(completion(n=2, usage=usage, logprobs=0), events)]
    for chunk in built:
        chunk["choices"][0]["logprobs"] = None
    assert len(prepared) == 2 * len(ODD)
    assert prepared == built


def test_a_completion_of_several_choices_that_repeats_its_prompt() -> None:
    events = [Started("f", PROMPT), *(Delta(at, Content(str(at)), TOTAL) for at in (1, 0)), Done(TOTAL)]
    whole = completion(n=2, echo=True).whole(events)
    assert [choice["text"] for choice in whole["choices"]] == ["Once0", "Once1"]


# Embeddings


def test_vectors_as_numbers_and_as_bytes() -> None:
    vectors = [array("f", [0.5, -1.0]), array("f", [0.0, 2.0])]
    events: list[CallEvent] = [Started("f", Usage()), *(Embedded(each, PROMPT) for each in vectors), Done(PROMPT)]
    whole = EmbeddingAnswer(EmbedRequest("m", "alias", ("a", "b"))).whole(events)
    assert whole == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
            {"object": "embedding", "index": 1, "embedding": [0.0, 2.0]},
        ],
        "model": "alias",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    packed = EmbeddingAnswer(EmbedRequest("m", "alias", ("a", "b"), as_base64=True)).whole(events)
    assert base64.b64decode(packed["data"][1]["embedding"]) == b"\x00\x00\x00\x00\x00\x00\x00\x40"


# All of them

DIALECTS: dict[str, Any] = {
    "messages": lambda: MessageAnswer("msg_1", "m"),
    "responses": lambda: ResponseAnswer("1", 1000, ASKED),
    "completions": completion,
    "embeddings": lambda: EmbeddingAnswer(EmbedRequest("m", "m", ("a",))),
}


@pytest.mark.parametrize("make", DIALECTS.values(), ids=DIALECTS)
def test_a_failure_after_the_headers_is_told_in_the_apis_words(make: Any) -> None:
    ((name, data),) = make().failed(EdgeError("It broke"))
    told = data["error"]
    assert told["message"] == "It broke"
    assert told["code"] == "edge_error"
    assert name in (None, "error")
    json.dumps(data)


@pytest.mark.parametrize("make", DIALECTS.values(), ids=DIALECTS)
def test_nothing_is_said_of_waiting(make: Any) -> None:
    assert list(make().stream(Waiting("queued", "m", 3))) == []
