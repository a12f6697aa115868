"""A conversation -> the prompt, by the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, Message
from citadel.text.tools_in_words import declared, in_words, renders_tools

FALLBACK: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, for weights that carry no template."""

_RESERVED: Final = frozenset({"messages", "conversations", "tools", "documents", "chat_template"}) | {
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
}
_MENTIONS_DEVELOPER: Final = re.compile(r"""["']developer["']""")


def render(request: ChatRequest, template: str | None, special_tokens: Mapping[str, str]) -> str:
    """The prompt's text. Raises BadRequest when the template refuses the conversation.

    The first call imports Jinja, and the first with a template compiles it, tens of milliseconds each.
    """
    from citadel.text import jinja  # noqa: PLC0415 - a server that starts needs no Jinja

    source = template or FALLBACK
    knows_developer = _MENTIONS_DEVELOPER.search(source) is not None
    tools, said = request.tools, request.messages
    if not renders_tools(source) and (tools or "tool_calls" not in source):
        tools, said = (), in_words(said, tools)
    messages = [_message(message, knows_developer=knows_developer) for message in said]
    if taken := _RESERVED & request.template_kwargs.keys():
        name = min(taken)
        raise BadRequest(f"chat_template_kwargs.{name}: the server sets this itself", "chat_template_kwargs")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise BadRequest("continue_final_message: the final message is not the assistant's", "continue_final_message")
    values: dict[str, Any] = {
        **special_tokens,
        **request.template_kwargs,
        "tools": [declared(tool) for tool in tools] or None,
        "documents": None,
        "add_generation_prompt": not request.continue_final_message,
    }
    run = jinja.render_open if request.continue_final_message else jinja.render
    try:
        return run(source, messages, values)
    except Exception as error:  # a template is a program: it may raise anything, and none of it is ours
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRequest(f"The model's chat template refused the messages: {why}", "messages") from error


def opens_reasoning(prompt: str, marker: str) -> bool:
    """Whether the output starts inside reasoning: the prompt ends with the marker that opens it.

    Only the very end counts, which the template wrote: a marker in a message is somebody's words.
    """
    return prompt.rstrip().endswith(marker.rstrip()) if marker else False


def _message(message: Message, *, knows_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in message.tool_calls
        ]
    elif message.content is None:
        out["content"] = ""
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    return out


def _object(arguments: str) -> Any:
    """Arguments as the object that templates iterate over; text that is none is left to the template."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else arguments
