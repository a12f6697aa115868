"""The body of OpenAI's `POST /v1/responses` -> a `ChatRequest`, or an error that names the field.

The part that agents use: text, function tools, and earlier output items passed back as input. Nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, Message, NamedTool, SamplingRequest, ToolCall, ToolSpec
from citadel.wire.fields import Body, checked, needed, tool_choice

_UNSUPPORTED: Final = {
    "background": "a call is answered on its connection",
    "conversation": "nothing is stored; pass the earlier items as input",
    "previous_response_id": "nothing is stored; pass the earlier items as input",
    "prompt": "nothing is stored; send the prompt's text",
    "top_logprobs": "use chat completions",
}


class _Part(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


_Parts = Annotated[list[_Part], Field(fail_fast=True)]


class _Item(Body):
    """Any of the kinds of input; which fields it must have depends on `type`."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | _Parts | None = None
    summary: _Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | _Parts | None = None


class _Tool(Body):
    type: str
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class _NamedChoice(Body):
    type: Literal["function"]
    name: str


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class _Text(Body):
    format: _Format | None = None


class _Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesBody(Body):
    """The fields that are honoured."""

    input: str | Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None


def responses_request(body: Mapping[str, Any], model: str, requested_model: str) -> ChatRequest:
    """`model` as for `chat_request`. Raises BadRequest."""
    asked = checked(body, ResponsesBody, _UNSUPPORTED)
    tools = tuple(_tool(index, tool) for index, tool in enumerate(asked.tools or ()))
    effort = asked.reasoning.effort if asked.reasoning else None
    kwargs: dict[str, Any] = {"enable_thinking": effort != "none"}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    return ChatRequest(
        model=model,
        requested_model=requested_model,
        messages=_conversation(asked),
        tools=tools,
        tool_choice=_tool_choice(asked, tools),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        response_format=_response_format(asked.text.format if asked.text else None),
        sampling=SamplingRequest(temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_output_tokens),
        stream=bool(asked.stream),
        template_kwargs=kwargs,
    )


@dataclass(slots=True)
class _Turn:
    """What the assistant did in one go: its items are one message."""

    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def message(self) -> Message | None:
        if not (self.thoughts or self.texts or self.calls):
            return None
        content = "\n".join(self.texts) if self.texts or not self.calls else None
        reasoning = "\n".join(self.thoughts) if self.thoughts else None
        return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(self.calls))


def _conversation(asked: ResponsesBody) -> tuple[Message, ...]:
    found = [Message("system", asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return (*found, Message("user", asked.input))
    turn = _Turn()
    for index, item in enumerate(asked.input):
        where = f"input[{index}]"
        other = _told(where, item)
        if other is None:
            _did(where, item, turn)
            continue
        if (message := turn.message()) is not None:
            found.append(message)
            turn = _Turn()
        found.append(other)
    if (message := turn.message()) is not None:
        found.append(message)
    return tuple(found)


def _told(where: str, item: _Item) -> Message | None:
    """The message of an item that is not the assistant's."""
    if item.type == "function_call_output":
        call_id = needed(where, "call_id", item.call_id)
        return Message("tool", _text(f"{where}.output", item.output), tool_call_id=call_id)
    if item.type != "message" or item.role == "assistant":
        return None
    if item.role is None:
        raise BadRequest(f"{where}.role: this field is required", param=f"{where}.role")
    return Message(item.role, _text(f"{where}.content", item.content))


def _did(where: str, item: _Item, turn: _Turn) -> None:
    match item.type:
        case "message":
            turn.texts.append(_text(f"{where}.content", item.content))
        case "reasoning":  # its text, or at least its summary
            turn.thoughts += [part.text for part in _parts(item.content) or item.summary or () if part.text]
        case "function_call":
            name, call_id = needed(where, "name", item.name), needed(where, "call_id", item.call_id)
            turn.calls.append(ToolCall(call_id, name, item.arguments or ""))
        case _:
            raise BadRequest(f"{where}.type: not supported: items of type {item.type!r}", param=f"{where}.type")


def _parts(content: str | list[_Part] | None) -> list[_Part]:
    return [_Part(type="reasoning_text", text=content)] if isinstance(content, str) else content or []


def _text(where: str, content: str | list[_Part] | None) -> str:
    if content is None:
        raise BadRequest(f"{where}: this field is required", param=where)
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        said = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("input_text", "output_text", "text", "refusal") or said is None:
            param = f"{where}[{index}]"
            raise BadRequest(f"{param}: not supported: only text parts are, not {part.type!r}", param)
        texts.append(said)
    return "\n".join(texts)


def _tool(index: int, tool: _Tool) -> ToolSpec:
    where = f"tools[{index}]"
    if tool.type != "function":
        raise BadRequest(f"{where}.type: not supported: only functions are, not {tool.type!r}", param=f"{where}.type")
    return ToolSpec(needed(where, "name", tool.name), tool.description, tool.parameters, strict=bool(tool.strict))


def _tool_choice(asked: ResponsesBody, tools: tuple[ToolSpec, ...]) -> Literal["auto", "none", "required"] | NamedTool:
    choice = asked.tool_choice or "auto"
    if isinstance(choice, _NamedChoice):
        return tool_choice("auto", choice.name, "tool_choice.name", tools)
    return tool_choice(choice, None, "tool_choice.name", tools)


def _response_format(given: _Format | None) -> dict[str, Any] | None:
    """As in a `ChatRequest`."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.json_schema is None:
        raise BadRequest("text.format.schema: this field is required", param="text.format.schema")
    return {"type": "json_schema", "schema": given.json_schema, "strict": bool(given.strict)}
