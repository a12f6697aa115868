"""Tools for models whose chat template does not render them: told in a system message, in the notation of Hermes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from citadel.messages import Message, ToolSpec

_INSTRUCTIONS: Final = """You can call functions. Here they are, each with a JSON Schema of its arguments:
<tools>
{tools}
</tools>
To call one, write nothing but its name and arguments as a JSON object between these tags, one pair of tags per call:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
What a function returns comes back to you between <tool_response> tags. If none is needed, answer in words."""


def renders_tools(template: str) -> bool:
    return "tools" in template


def in_words(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
    """The conversation with the tools, the calls and their results as text."""
    told: list[Message] = []
    for message in messages:
        written = _written(message)
        if message.role == "tool" and told and told[-1].role == "user" and _is_response(told[-1]):
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n{written.content}")
        else:
            told.append(written)
    if not tools:
        return tuple(told)
    instructions = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(declared(tool), ensure_ascii=False) for tool in tools)
    )
    if told[0].role in ("system", "developer"):
        return replace(told[0], content=f"{told[0].content or ''}\n\n{instructions}".lstrip()), *told[1:]
    return Message("system", instructions), *told


def declared(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _written(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content or ''}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    )
    return replace(message, content=f"{message.content}\n{calls}" if message.content else calls, tool_calls=())


def _is_response(message: Message) -> bool:
    return (message.content or "").startswith("<tool_response>\n")
