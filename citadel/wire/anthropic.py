"""The body of Anthropic's `POST /v1/messages` -> a `ChatRequest`, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Field, StrictBool, StrictInt

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, Message, NamedTool, SamplingRequest, ToolCall, ToolSpec
from citadel.wire.fields import Body, checked, needed, tool_choice
from citadel.wire.sampling import stops

_UNSUPPORTED: Final = {
    "container": "there is no code execution",
    "mcp_servers": "tools are run by the client",
}


_MODES: Final[dict[str, Literal["auto", "none", "required"]]] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "auto",
}


class _Block(Body):
    """Any of the kinds of content; which fields it must have depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[_Block], Field(fail_fast=True)] | None = None


_Blocks = Annotated[list[_Block], Field(fail_fast=True)]


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class _Tool(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class _Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class _Format(Body):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class CountBody(Body):
    """What decides the prompt: all that `/v1/messages/count_tokens` takes."""

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    system: str | _Blocks | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None


class MessagesBody(CountBody):
    """The fields that are honoured."""

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stream: StrictBool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] | None = None


def messages_request(body: Mapping[str, Any], model: str, requested_model: str) -> ChatRequest:
    """`model` as for `chat_request`. Raises BadRequest."""
    asked = checked(body, MessagesBody, _UNSUPPORTED)
    sampling = SamplingRequest(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, max_tokens=asked.max_tokens
    )
    stop = stops(asked.stop_sequences, "stop_sequences")
    return _request(asked, model, requested_model, sampling, stop, stream=bool(asked.stream))


def count_request(body: Mapping[str, Any], model: str, requested_model: str) -> ChatRequest:
    """The same conversation, asked for its length alone."""
    return _request(checked(body, CountBody, _UNSUPPORTED), model, requested_model, SamplingRequest(), (), stream=False)


def _request(
    asked: CountBody,
    model: str,
    requested_model: str,
    sampling: SamplingRequest,
    stop: tuple[str, ...],
    *,
    stream: bool,
) -> ChatRequest:
    tools = tuple(_tool(index, tool) for index, tool in enumerate(asked.tools or ()))
    output, choice = asked.output_config, asked.tool_choice
    schema = output.format.json_schema if output and output.format else None
    kwargs: dict[str, Any] = {"enable_thinking": asked.thinking is not None and asked.thinking.type != "disabled"}
    if output and output.effort:
        kwargs["reasoning_effort"] = output.effort
    return ChatRequest(
        model=model,
        requested_model=requested_model,
        messages=_conversation(asked),
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=None if schema is None else {"type": "json_schema", "schema": schema, "strict": True},
        sampling=sampling,
        stop=stop,
        stream=stream,
        template_kwargs=kwargs,
        continue_final_message=asked.messages[-1].role == "assistant",
    )


def _conversation(asked: CountBody) -> tuple[Message, ...]:
    found: list[Message] = []
    if asked.system:
        found.append(Message("system", _texts("system", asked.system)))
    for index, message in enumerate(asked.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            found.append(Message(message.role, message.content))
        elif message.role == "assistant":
            found.append(_assistant(where, message.content))
        else:
            found += _user(where, message.role, message.content)
    return tuple(found)


def _user(where: str, role: Literal["user", "system"], blocks: list[_Block]) -> list[Message]:
    """Results of tools are messages of their own; texts side by side are one."""
    found: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "tool_result":
            if texts:
                found.append(Message(role, "\n".join(texts)))
                texts = []
            content = _texts(f"{at}.content", block.content or "")
            found.append(Message("tool", content, tool_call_id=needed(at, "tool_use_id", block.tool_use_id)))
        else:
            texts.append(_text(at, block))
    if texts or not found:
        found.append(Message(role, "\n".join(texts)))
    return found


def _assistant(where: str, blocks: list[_Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(needed(at, "thinking", block.thinking))
            case "redacted_thinking":
                continue  # nothing here can read it
            case "tool_use":
                arguments = orjson.dumps(block.input or {}).decode()
                calls.append(ToolCall(needed(at, "id", block.id), needed(at, "name", block.name), arguments))
            case _:
                texts.append(_text(at, block))
    return Message(
        "assistant",
        "\n".join(texts) if texts or not calls else None,
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )


def _texts(where: str, content: str | list[_Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(f"{where}[{index}]", block) for index, block in enumerate(content))


def _text(where: str, block: _Block) -> str:
    if block.type != "text":
        raise BadRequest(f"{where}: not supported here: a block of type {block.type!r}", param=where)
    return needed(where, "text", block.text)


def _tool(index: int, tool: _Tool) -> ToolSpec:
    if tool.type not in (None, "custom"):
        where = f"tools[{index}].type"
        raise BadRequest(f"{where}: not supported: there is no tool {tool.type!r} in the server", param=where)
    return ToolSpec(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))


def _tool_choice(
    choice: _ToolChoice | None, tools: tuple[ToolSpec, ...]
) -> Literal["auto", "none", "required"] | NamedTool:
    if choice is None:
        return "auto"
    named = (choice.name or "") if choice.type == "tool" else None
    return tool_choice(_MODES[choice.type], named, "tool_choice.name", tools)
