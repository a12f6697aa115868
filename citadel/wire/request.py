"""The body of `POST /v1/chat/completions`: JSON text -> dict -> `ChatRequest`, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, cast

import orjson
from pydantic import Field, StrictBool, StrictInt

from citadel.errors import BadRequest, InvalidJson
from citadel.messages import ChatRequest, Message, NamedTool, SamplingRequest, ToolCall, ToolSpec
from citadel.wire.fields import UNSUPPORTED, Body, checked, tool_choice
from citadel.wire.sampling import MAX_TOP_LOGPROBS, SamplingBody, StreamOptions, sampling, stops

MAX_NESTING: Final = 200


class _Part(Body):
    type: str
    text: str | None = None


class _FunctionCall(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | None = ""


class _ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: _FunctionCall


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class _Tool(Body):
    type: Literal["function"]
    function: _Function


class _NamedFunction(Body):
    name: str


class _NamedChoice(Body):
    type: Literal["function"]
    function: _NamedFunction


class _JsonSchema(Body):
    name: str
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class _ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _Conversation(Body):
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: StrictBool | None = None


class ChatBody(SamplingBody, _Conversation):
    """The fields that are honoured."""

    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. Raises InvalidJson, whose reason says where. Of duplicate keys the last wins."""
    try:
        body: object = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(body, dict):
        raise InvalidJson("the body is JSON, but no object")
    _check_nesting(cast("dict[str, Any]", body))
    return cast("dict[str, Any]", body)


def chat_request(body: Mapping[str, Any], model: str, requested_model: str) -> ChatRequest:
    """`model` is the configured id that `requested_model` (the body's, or the default) means. Raises BadRequest."""
    chat = checked(body, ChatBody, UNSUPPORTED)
    tools = tuple(_tool(tool.function) for tool in chat.tools or ())
    return ChatRequest(
        model=model,
        requested_model=requested_model,
        messages=tuple(_message(index, message) for index, message in enumerate(chat.messages)),
        tools=tools,
        tool_choice=_tool_choice(chat, tools),
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        response_format=_response_format(chat.response_format),
        sampling=_sampling(chat),
        stop=stops(chat.stop),
        n=chat.n or 1,
        stream=bool(chat.stream),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        continuous_usage_stats=bool(chat.stream_options and chat.stream_options.continuous_usage_stats),
        template_kwargs=_template_kwargs(chat),
        continue_final_message=bool(chat.continue_final_message),
    )


def _check_nesting(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise InvalidJson(f"the body is nested more than {MAX_NESTING} deep")


def _children(parent: dict[str, Any] | list[Any]) -> list[Any]:
    values = parent.values() if isinstance(parent, dict) else parent
    return [value for value in values if isinstance(value, (dict, list))]


def _message(index: int, message: _Message) -> Message:
    where = f"messages[{index}]"
    if message.role == "tool" and message.tool_call_id is None:
        raise BadRequest(
            f"{where}.tool_call_id: a tool message must say which call it answers", f"{where}.tool_call_id"
        )
    return Message(
        role=message.role,
        content=_content(where, message.content),
        reasoning=message.reasoning if message.reasoning is not None else message.reasoning_content,
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "") for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(where: str, content: str | list[_Part] | None) -> str | None:
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            param = f"{where}.content[{index}]"
            raise BadRequest(f"{param}: not supported: only text parts are, not {part.type!r}", param)
        texts.append(part.text)
    return "\n".join(texts)


def _tool(function: _Function) -> ToolSpec:
    return ToolSpec(function.name, function.description, function.parameters, strict=bool(function.strict))


def _tool_choice(chat: ChatBody, tools: tuple[ToolSpec, ...]) -> Literal["auto", "none", "required"] | NamedTool:
    choice, where = chat.tool_choice or "auto", "tool_choice.function.name"
    if isinstance(choice, _NamedChoice):
        return tool_choice("auto", choice.function.name, where, tools)
    return tool_choice(choice, None, where, tools)


def _response_format(given: _ResponseFormat | None) -> dict[str, Any] | None:
    """None for plain text; else `{"type": "json_object"}` or `{"type": "json_schema", "schema", "strict"}`."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.json_schema is None:
        raise BadRequest("response_format.json_schema: this field is required", param="response_format.json_schema")
    schema = given.json_schema.json_schema
    return {"type": "json_schema", "schema": {} if schema is None else schema, "strict": bool(given.json_schema.strict)}


def _sampling(chat: ChatBody) -> SamplingRequest:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise BadRequest("top_logprobs: it needs logprobs: true", param="top_logprobs")
    limit = chat.max_completion_tokens or chat.max_tokens
    return sampling(chat, limit, (chat.top_logprobs or 0) if chat.logprobs else None)


def _template_kwargs(chat: ChatBody) -> dict[str, Any]:
    """`enable_thinking` is true unless the caller or `reasoning_effort` says otherwise."""
    kwargs: dict[str, Any] = {"enable_thinking": chat.reasoning_effort != "none"}
    if chat.reasoning_effort is not None:
        kwargs["reasoning_effort"] = chat.reasoning_effort
    return kwargs | (chat.chat_template_kwargs or {})
