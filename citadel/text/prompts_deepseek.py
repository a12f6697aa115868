"""The prompts of DeepSeek V3.2, V4 and V4.1, whose checkpoints carry no chat template.

The sentences that explain the tools are the ones that these models were trained on; they must stay as they are.

V4 and V4.1 know no role for tool results: they stand in the user's turn. V3.2 puts them behind the call that asked.
Reasoning of earlier turns is left out, unless there are tools (V3.2: unless it follows the last question).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, cast

from citadel.messages import Message, ToolCall, ToolSpec

_BOS: Final = "<｜begin▁of▁sentence｜>"
_EOS: Final = "<｜end▁of▁sentence｜>"
_USER: Final = "<｜User｜>"
_ASSISTANT: Final = "<｜Assistant｜>"
_SYSTEM: Final = "<｜System｜>"
_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"

_EXAMPLE: Final = """<{tag}{block}>
<{tag}invoke name="${what}_NAME">
<{tag}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{tag}parameter>
...
</{tag}invoke>
<{tag}invoke name="${what}_NAME2">
...
</{tag}invoke>
</{tag}{block}>"""

_TOOLS_V32: Final = (
    """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{tag}{block}>" block like the following as part of your reply to the user:
"""
    + _EXAMPLE.replace("${what}", "$FUNCTION")
    + """
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<{tag}{block}>
...
</{tag}{block}>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""
)

_TOOLS_V4: Final = (
    """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{tag}{block}>" block like the following:

"""
    + _EXAMPLE.replace("${what}", "$TOOL")
    + """

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
)

_HIGH: Final = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_MAX: Final = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
_GRADED: Final = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


@dataclass(frozen=True, slots=True)
class _Version:
    """`tag` begins every tag of the markup, `block` names the one around calls; `efforts` by OpenAI's names."""

    tag: str
    block: str
    tools: str
    efforts: dict[str, str]
    effort: str = ""
    system: str = ""
    results_in_user_turn: bool = True


_VERSIONS: Final = {
    "deepseek_v32": _Version("｜DSML｜", "function_calls", _TOOLS_V32, {}, results_in_user_turn=False),
    "deepseek_v4": _Version("｜DSML｜", "tool_calls", _TOOLS_V4, {"high": _HIGH, "xhigh": _HIGH, "max": _MAX}),
    "deepseek_v41": _Version(
        "｜DSML｜ ",
        "calls",
        _TOOLS_V4,
        {name: _GRADED.format(grade) for name, grade in (("minimal", 25), ("low", 50), ("max", 100))},
        effort=_GRADED.format(75),
        system=_SYSTEM,
    ),
}

WRITTEN_HERE: Final = frozenset(_VERSIONS)
"""The formats whose prompts `render` writes."""


def render(
    fmt: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    thinking: bool,
    effort: str | None = None,
    continues: bool = False,
) -> str:
    """The prompt, up to where the model goes on. `continues`: it goes on with the last message, its own."""
    version = _VERSIONS[fmt]
    lead = [message.content or "" for message in messages if message.role in ("system", "developer")]
    if tools:
        lead.append(_tools(version, tools))
    before = (version.efforts.get(effort or "", version.effort)) if thinking else ""
    prompt = _BOS + (version.system if before or lead else "") + before + "\n\n".join(lead)
    talk = [message for message in messages if message.role not in ("system", "developer")]
    asked = max((at for at, message in enumerate(talk) if _asks(version, message)), default=-1)
    keeps_all = bool(tools) and version.results_in_user_turn
    at = 0
    for role, group in groupby(talk, key=lambda message: message.role if message.role == "assistant" else "user"):
        turn = list(group)
        if role == "user":
            prompt += _user_turn(version, turn, talk[at - 1].tool_calls if at else ())
        else:
            for place, message in enumerate(turn, start=at):
                thinks = thinking and (keeps_all or place > asked)
                prompt += _header(prompt, version, thinks=thinks) + _own(version, message, thinks=thinks)
        at += len(turn)
    if continues:
        return prompt.removesuffix(_EOS)
    return prompt + _header(prompt, version, thinks=thinking)


def _asks(version: _Version, message: Message) -> bool:
    return message.role == "user" or (message.role == "tool" and version.results_in_user_turn)


def _header(prompt: str, version: _Version, *, thinks: bool) -> str:
    """What stands before the model's words: who speaks, unless it goes on after results, and whether it thinks."""
    goes_on = not version.results_in_user_turn and prompt.endswith("</function_results>")
    return ("\n\n" if goes_on else _ASSISTANT) + (_OPEN if thinks else _CLOSE)


def _own(version: _Version, message: Message, *, thinks: bool) -> str:
    reasoning = f"{message.reasoning or ''}{_CLOSE}" if thinks else ""
    return f"{reasoning}{message.content or ''}{_calls(version, message.tool_calls)}{_EOS}"


def _user_turn(version: _Version, turn: Sequence[Message], calls: Sequence[ToolCall]) -> str:
    """Questions and results that follow one another; results in the order of the calls that asked for them."""
    order = {call.id: number for number, call in enumerate(calls)}
    turn = sorted(turn, key=lambda message: order.get(message.tool_call_id or "", len(order)))
    if version.results_in_user_turn:
        texts = (
            f"<tool_result>{message.content or ''}</tool_result>" if message.role == "tool" else message.content or ""
            for message in turn
        )
        return _USER + "\n\n".join(texts)
    results = "".join(f"\n<result>{message.content or ''}</result>" for message in turn if message.role == "tool")
    asked = "\n\n".join(message.content or "" for message in turn if message.role != "tool")
    block = f"\n\n<function_results>{results}\n</function_results>" if results else ""
    return block + (_USER + asked if asked or not results else "")


def _tools(version: _Version, tools: Sequence[ToolSpec]) -> str:
    schemas = "\n".join(_json(_described(tool)) for tool in tools)
    return version.tools.replace("{tag}", version.tag).replace("{block}", version.block).replace("{schemas}", schemas)


def _described(tool: ToolSpec) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {key: value for key, value in described.items() if value is not None}


def _calls(version: _Version, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    tag, block = version.tag, version.block
    written = "\n".join(
        f'<{tag}invoke name="{call.name}">\n{_parameters(version, call)}\n</{tag}invoke>' for call in calls
    )
    return f"\n\n<{tag}{block}>\n{written}\n</{tag}{block}>"


def _parameters(version: _Version, call: ToolCall) -> str:
    tag = version.tag
    return "\n".join(
        f'<{tag}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{tag}parameter>"
        for name, value in _arguments(call).items()
    )


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The call's arguments; what is no object stays readable under a name of its own."""
    try:
        values: Any = json.loads(call.arguments or "{}")
    except ValueError:
        values = call.arguments
    return cast("dict[str, Any]", values) if isinstance(values, dict) else {"arguments": values}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
