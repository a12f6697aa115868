"""Each API's body -> our request, by tables: what the words of one API mean is what chat's words for it mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from citadel.errors import BadRequest
from citadel.messages import EmbedRequest, Message, NamedTool, SamplingRequest, ToolCall, ToolSpec
from citadel.wire.anthropic import count_request, messages_request
from citadel.wire.completions import completion_request
from citadel.wire.embeddings import embedding_request
from citadel.wire.responses import responses_request
from citadel.wire.tokens import detokenize_request, tokenize_request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = Message("user", "hi")
ADD = ToolSpec("add", "Adds", SCHEMA)
CALLED = Message("assistant", None, tool_calls=(ToolCall("c1", "add", '{"a":1}'),))
RESULT = Message("tool", "2", tool_call_id="c1")


def said(request: Any, expected: dict[str, Any]) -> None:
    assert {name: getattr(request, name) for name in expected} == expected


# Completions

COMPLETIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"prompt": "hi"}, {"prompt": "hi", "messages": (), "n": 1, "stream": False, "echo": False}),
    "token ids": ({"prompt": [1, 2]}, {"prompt": (1, 2)}),
    "the only text of a list": ({"prompt": ["hi"]}, {"prompt": "hi"}),
    "the only ids of a list": ({"prompt": [[1, 2]]}, {"prompt": (1, 2)}),
    "sixteen tokens by default": ({"prompt": "hi"}, {"sampling": SamplingRequest(max_tokens=16)}),
    "how to sample": (
        {"prompt": "hi", "max_tokens": 5, "top_k": -1, "seed": 3, "logprobs": 2, "logit_bias": {"7": -1}},
        {"sampling": SamplingRequest(max_tokens=5, top_k=0, seed=3, logprobs=2, logit_bias={7: -1})},
    ),
    "one stop": ({"prompt": "hi", "stop": "x"}, {"stop": ("x",)}),
    "what it is streamed with": (
        {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "include_usage": True, "continuous_usage_stats": True},
    ),
    "as many as it is the best of": ({"prompt": "hi", "n": 2, "best_of": 2}, {"n": 2}),
    "what has no effect": ({"prompt": "hi", "user": "u", "suffix": None, "suggestion": 1}, {"prompt": "hi"}),
}


@pytest.mark.parametrize(("body", "expected"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_a_completion(body: dict[str, Any], expected: dict[str, Any]) -> None:
    request = completion_request({"model": "alias", **body}, "m", "alias")
    said(request, {"model": "m", "requested_model": "alias", **expected})


# Anthropic's messages


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


MESSAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({}, {"messages": (USER,), "template_kwargs": {"enable_thinking": False}, "tools": ()}),
    "the system's words go first": ({"system": "Be brief."}, {"messages": (Message("system", "Be brief."), USER)}),
    "the system's words in blocks": (
        {"system": [block("text", text="Be"), block("text", text="brief.")]},
        {"messages": (Message("system", "Be\nbrief."), USER)},
    ),
    "texts side by side": (
        {"messages": [user(block("text", text="a"), block("text", text="b", cache_control={"type": "ephemeral"}))]},
        {"messages": (Message("user", "a\nb"),)},
    ),
    "a call and its result": (
        {
            "messages": [
                user(block("text", text="hi")),
                {"role": "assistant", "content": [block("tool_use", id="c1", name="add", input={"a": 1})]},
                user(
                    block("tool_result", tool_use_id="c1", content=[block("text", text="2")]), block("text", text="?")
                ),
            ]
        },
        {"messages": (USER, CALLED, RESULT, Message("user", "?"))},
    ),
    "thoughts are passed back": (
        {
            "messages": [
                user(block("text", text="hi")),
                {
                    "role": "assistant",
                    "content": [
                        block("thinking", thinking="Hm.", signature="s"),
                        block("redacted_thinking", data="x"),
                        block("text", text="Yes."),
                    ],
                },
                user(block("text", text="?")),
            ]
        },
        {"messages": (USER, Message("assistant", "Yes.", reasoning="Hm."), Message("user", "?"))},
    ),
    "an answer that is begun is continued": (
        {"messages": [user(block("text", text="hi")), {"role": "assistant", "content": "It is"}]},
        {"continue_final_message": True},
    ),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}},
        {"template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
    ),
    "a tool": ({"tools": [{"name": "add", "description": "Adds", "input_schema": SCHEMA}]}, {"tools": (ADD,)}),
    "any tool": (
        {"tools": [{"name": "add"}], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "this tool": (
        {"tools": [{"name": "add"}], "tool_choice": {"type": "tool", "name": "add"}},
        {"tool_choice": NamedTool("add")},
    ),
    "no tool": ({"tools": [{"name": "add"}], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    "how to sample": (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"], "stream": True},
        {
            "sampling": SamplingRequest(temperature=0.5, top_p=0.9, top_k=5, max_tokens=9),
            "stop": ("x",),
            "stream": True,
        },
    ),
    "a schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
    ),
}


@pytest.mark.parametrize(("body", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message(body: dict[str, Any], expected: dict[str, Any]) -> None:
    whole = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}
    request = messages_request(whole, "m", "alias")
    said(request, {"model": "m", "requested_model": "alias", **expected})
    assert count_request(whole, "m", "alias").messages == request.messages


# OpenAI's responses

RESPONSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"input": "hi"}, {"messages": (USER,), "template_kwargs": {"enable_thinking": True}}),
    "instructions go first": (
        {"input": "hi", "instructions": "Be brief."},
        {"messages": (Message("system", "Be brief."), USER)},
    ),
    "items of all kinds": (
        {
            "input": [
                {"role": "user", "content": [block("input_text", text="h"), block("input_text", text="i")]},
                {"type": "reasoning", "summary": [block("summary_text", text="Hm.")]},
                {"type": "message", "role": "assistant", "content": [block("output_text", text="I add.")]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}', "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"role": "developer", "content": "Go on."},
            ]
        },
        {
            "messages": (
                Message("user", "h\ni"),
                Message("assistant", "I add.", reasoning="Hm.", tool_calls=CALLED.tool_calls),
                RESULT,
                Message("developer", "Go on."),
            )
        },
    ),
    "a call alone has no content": (
        {"input": [{"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}]},
        {"messages": (CALLED,)},
    ),
    "a tool": (
        {"input": "hi", "tools": [{"type": "function", "name": "add", "description": "Adds", "parameters": SCHEMA}]},
        {"tools": (ADD,), "tool_choice": "auto", "parallel_tool_calls": True},
    ),
    "this tool, once": (
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "add"}],
            "tool_choice": {"type": "function", "name": "add"},
            "parallel_tool_calls": False,
        },
        {"tool_choice": NamedTool("add"), "parallel_tool_calls": False},
    ),
    "without thinking": (
        {"input": "hi", "reasoning": {"effort": "none"}},
        {"template_kwargs": {"enable_thinking": False, "reasoning_effort": "none"}},
    ),
    "how to sample": (
        {"input": "hi", "temperature": 0, "top_p": 0.5, "max_output_tokens": 7, "stream": True},
        {"sampling": SamplingRequest(temperature=0, top_p=0.5, max_tokens=7), "stream": True},
    ),
    "an object": (
        {"input": "hi", "text": {"format": {"type": "json_object"}}},
        {"response_format": {"type": "json_object"}},
    ),
    "a schema": (
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
    ),
    "nothing that is set": (
        {"input": "hi", "previous_response_id": None, "background": False, "store": True, "truncation": "disabled"},
        {"messages": (USER,)},
    ),
}


@pytest.mark.parametrize(("body", "expected"), RESPONSES.values(), ids=RESPONSES)
def test_a_response(body: dict[str, Any], expected: dict[str, Any]) -> None:
    request = responses_request(body, "m", "alias")
    said(request, {"model": "m", "requested_model": "alias", **expected})


# Embeddings and tokens

EMBEDDINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"input": "hi"}, {"inputs": ("hi",), "as_base64": False}),
    "texts": ({"input": ["a", "b"]}, {"inputs": ("a", "b")}),
    "token ids": ({"input": [1, 2]}, {"inputs": ((1, 2),)}),
    "several": ({"input": [[1], [2, 3]]}, {"inputs": ((1,), (2, 3))}),
    "as bytes": ({"input": "hi", "encoding_format": "base64", "user": "u"}, {"as_base64": True}),
    "nothing that is set": ({"input": "hi", "dimensions": None}, {"inputs": ("hi",)}),
}


@pytest.mark.parametrize(("body", "expected"), EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embeddings(body: dict[str, Any], expected: dict[str, Any]) -> None:
    request = embedding_request(body, "m", "alias")
    said(request, {"model": "m", "requested_model": "alias", **expected})
    assert (request.n, request.stream) == (1, False)
    assert isinstance(request, EmbedRequest)


def test_tokens() -> None:
    given = tokenize_request({"prompt": "hi", "return_token_strs": True}, "m", "m")
    assert (given.request.prompt, given.token_texts) == ("hi", True)
    given = tokenize_request({"messages": [{"role": "user", "content": "hi"}]}, "m", "m")
    assert (given.request.messages, given.request.prompt, given.token_texts) == ((USER,), None, False)
    assert detokenize_request({"tokens": [1, 2]}, "m", "m").tokens == [1, 2]


# What is wrong

MESSAGE: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (completion_request, {}, "prompt"),
    (completion_request, {"prompt": "a", "max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    (completion_request, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (messages_request, {"messages": MESSAGE["messages"]}, "max_tokens"),
    (messages_request, {**MESSAGE, "messages": []}, "messages"),
    (messages_request, {**MESSAGE, "messages": [user(block("image"))]}, "messages[0].content[0]"),
    (messages_request, {**MESSAGE, "messages": [user(block("tool_result"))]}, "messages[0].content[0].tool_use_id"),
    (messages_request, {**MESSAGE, "system": [block("text")]}, "system[0].text"),
    (messages_request, {**MESSAGE, "tool_choice": {"type": "any"}}, "tool_choice"),
    (messages_request, {**MESSAGE, "stop_sequences": [""]}, "stop_sequences"),
    (messages_request, {**MESSAGE, "container": "c"}, "container"),
    (count_request, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (responses_request, {}, "input"),
    (responses_request, {"input": [{"content": "x"}]}, "input[0].role"),
    (responses_request, {"input": [{"role": "user"}]}, "input[0].content"),
    (responses_request, {"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
    (responses_request, {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    (responses_request, {"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
    (responses_request, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (responses_request, {"input": "a", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    (embedding_request, {}, "input"),
    (embedding_request, {"input": [[]]}, "input[0]"),
    (embedding_request, {"input": [True]}, "input[0]"),
    (embedding_request, {"input": "a", "messages": [{"role": "user"}]}, "messages"),
    (tokenize_request, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    (tokenize_request, {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
    (tokenize_request, {}, "messages"),
    (detokenize_request, {"tokens": ["a"]}, "tokens[0]"),
]


@pytest.mark.parametrize(
    ("translate", "body", "param"), WRONG, ids=[f"{each.__name__}-{param}" for each, _, param in WRONG]
)
def test_what_is_wrong_is_named(translate: Callable[..., Any], body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        translate(body, "m", "m")
    assert caught.value.fields["param"] == param
    assert caught.value.message.startswith(param)
