"""tools + tool_choice + response_format + format -> one grammar over the whole output, for every engine.

The order of an output is the same in all cases: reasoning, free, where the model thinks; then what was asked for. What
the grammar lets through, the format's machine reads back as it was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, NamedTool, ToolSpec
from citadel.text.formats import Format, Thinking
from citadel.text.grammar_channels import Channels
from citadel.text.grammar_frames import Frames, Offered
from citadel.text.grammar_keywords import refusal
from citadel.text.grammar_lark import NEWLINE, Lark, NoWay, TokenId, either, seq, without
from citadel.text.grammar_schema import ANY_OBJECT, enforced, of_object

MAX_LENGTH: Final = 1_000_000
_BREAKS: Final = "/\\n{1,2}/?"


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is llguidance's Lark. `left_out`: paths of schema keywords that it does not enforce."""

    text: str
    left_out: tuple[str, ...] = ()


def compile_grammar(
    request: ChatRequest,
    fmt: Format,
    *,
    in_reasoning: bool,
    token_id: TokenId,
    thinking: Sequence[Thinking] | None = None,
) -> Grammar | None:
    """None where the output is free. Raises BadRequest for what can't be enforced and was asked to be.

    `token_id` gives the id of a marker that is one token of the model. `thinking`: the markers with which the model
    may open reasoning itself; None means all of the format's. Takes milliseconds, and for a large schema up to a
    second: not on the event loop.
    """
    calls = _offered(request) if request.tool_choice != "none" else []
    if request.response_format is None and not (request.tools and (fmt.frames or fmt.channels)):
        if request.tool_choice in ("auto", "none"):
            return None
        raise BadRequest(f"tool_choice: calls can't be written in the format {fmt.name}", "tool_choice")
    plan = _Plan(
        request=request,
        format=fmt,
        tools=calls if fmt.frames or fmt.channels else [],
        lark=Lark(token_id),
        in_reasoning=in_reasoning,
        thinking=fmt.thinking if thinking is None else thinking,
    )
    try:
        text, left_out = (_channels if fmt.channels else _frames)(plan)
    except NoWay:
        raise BadRequest("tools: what was asked for can't be written in this model's notation", "tools") from None
    why = f"it has over {MAX_LENGTH} characters" if len(text) > MAX_LENGTH else refusal(text)
    if why is not None:
        param = "response_format" if request.response_format is not None else "tools"
        raise BadRequest(f"{param}: the grammar made of it can't be used: {why}", param)
    of_tools = [each for tool in calls for each in tool.arguments.left_out]
    return Grammar(text, tuple(dict.fromkeys([*of_tools, *left_out])))


@dataclass(frozen=True)
class _Plan:
    request: ChatRequest
    format: Format
    tools: Sequence[Offered]
    lark: Lark
    in_reasoning: bool
    thinking: Sequence[Thinking]

    @property
    def must_call(self) -> bool:
        return self.request.tool_choice not in ("auto", "none")

    @property
    def several(self) -> bool:
        return self.request.parallel_tool_calls and not isinstance(self.request.tool_choice, NamedTool)

    @property
    def answer(self) -> str | None:
        """The answer's JSON; None where it is free text."""
        given = self.request.response_format
        if given is None or self.must_call:
            return None
        if given["type"] == "json_object":
            return self.lark.json(ANY_OBJECT, {})
        schema = enforced(given["schema"], "response_format.json_schema.schema", strict=True)
        return self.lark.json(schema.schema, schema.definitions)


def _offered(request: ChatRequest) -> list[Offered]:
    choice = request.tool_choice
    return [
        _offer(tool, f"tools[{index}].function.parameters")
        for index, tool in enumerate(request.tools)
        if not isinstance(choice, NamedTool) or tool.name == choice.name
    ]


def _offer(tool: ToolSpec, where: str) -> Offered:
    return Offered(tool.name, enforced(of_object(tool.parameters), where, strict=tool.strict), where, tool.strict)


def _frames(plan: _Plan) -> tuple[str, list[str]]:
    """Reasoning; then calls, or free text with calls in it, or an answer in its schema or calls instead."""
    lark, answer = plan.lark, plan.answer
    frames = Frames(lark, plan.format, plan.tools, several=plan.several, beside_json=answer is not None)
    # Where no call may be made, the model has still seen the tools, and must not begin one.
    names = [tool.name for tool in plan.request.tools]
    markers = frames.markers() if names else []
    if plan.must_call or (answer is not None and plan.tools):
        calls = lark.rule(frames.calls())
        body, further = either([calls, *([answer] if answer is not None else [])]), f"({NEWLINE} {calls})?"
    elif answer is not None:
        body, further = answer, ""
    else:
        free = without(markers) + (frames.no_bare_call(names) if names else "")
        body, further = _text_and_calls(plan, frames, free)
    reasoning = _Reasoning(plan, frames, markers, body, further if plan.several or not plan.must_call else "")
    return lark.text(either(reasoning.ways())), frames.left_out


def _text_and_calls(plan: _Plan, frames: Frames, free: str) -> tuple[str, str]:
    """Free text with calls in it, where calls may be made; and what of that may follow a first call.

    Two free texts never meet: where the first must stop, the second would go on with what is forbidden in both.
    """
    lark = plan.lark
    text = lark.free(free) + "?"
    # Markers of reasoning are part of free text, also where they are tokens, which text can't spell.
    markers = [lark.literal(marker) for one in plan.format.thinking for marker in (one.open, one.close)]
    tokens = [marker for marker in markers if marker.startswith("<[")]
    begun = [seq(text, either(tokens))] if tokens else []
    free_text = rest = seq(f"({begun[0]})*" if begun else "", text)
    if not plan.tools:
        return free_text, free_text
    calls = [seq(lark.until(marker, free), lark.rule(frames.after(marker))) for marker in frames.markers()]
    if (bare := frames.bare()) is not None:
        calls.append(bare)
    if plan.several:
        body = lark.rule(f"{lark.rule(either([*begun, *calls]))}* {text}")
        return body, body
    if frames.chained:
        rest = ""
    first = f"({lark.rule(either(calls))} {rest})"
    return f"({' | '.join([*(f'{lark.rule(each)}* {first}' for each in begun), first, free_text])})", rest


class _Reasoning:
    """What comes before `body`. A call may end reasoning, as its closing marker does; `further` follows that call."""

    def __init__(self, plan: _Plan, frames: Frames, markers: Sequence[str], body: str, further: str) -> None:
        self._plan = plan
        self._frames = frames
        self._markers = markers
        self._closes = list(dict.fromkeys(one.close for one in plan.format.thinking))
        self._body = body
        self._further = further

    def ways(self) -> list[str]:
        lark = self._plan.lark
        if self._plan.in_reasoning:
            return self._rest()
        opened = [lark.literal(one.open) for one in self._plan.thinking]
        return [self._body, *([seq(either(opened), lark.rule(either(self._rest())))] if opened else [])]

    def _rest(self) -> list[str]:
        lark, plan = self._plan.lark, self._plan
        free = without([*self._markers, *self._closes])
        ways = [seq(lark.until(close, free), _BREAKS, self._body) for close in self._closes]
        if plan.tools:
            ways += [
                seq(lark.until(marker, free), lark.rule(self._frames.after(marker)), self._further)
                for marker in self._markers
            ]
        if not plan.must_call and plan.request.response_format is None:
            ways.append(lark.free(free) + "?")
        return ways


def _channels(plan: _Plan) -> tuple[str, list[str]]:
    """Messages: analysis, then calls or the answer."""
    lark, answer = plan.lark, plan.answer
    channels = Channels(lark, plan.tools, several=plan.several)
    before = [channels.reasoning()] if plan.thinking else []
    ways = [channels.calls()] if plan.tools else []
    if not plan.must_call:
        ways.append(channels.answer(answer))
    if not plan.must_call and answer is None:
        before.append(channels.preamble())
    begun = channels.end_of_reasoning() if plan.in_reasoning else ""
    return lark.text(seq(begun, f"({either(before)})*" if before else "", either(ways))), []
