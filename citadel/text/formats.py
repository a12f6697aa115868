"""How each family of models writes its reasoning and its calls: data, and how a family is recognised.

A `Format` is all that the machine knows of a family. Its `frames` say how calls are written: a block of calls
between two markers, a head with the name, the arguments in one of four notations, a tail.

What users can rely on, in every format:
- Reasoning that the model opens itself is reasoning only at the start of the output. Later, `<think>` is text
  (unless the family's marker is a special token, which prose cannot contain: `Reasoning.anywhere`).
- `</think>` outside of reasoning is text, except at the very start, where it closes what the prompt opened.
- After reasoning that a call ended, the first `</think>` closes it late and is no text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from citadel.text.lexer import Maybe, Part, Slot, Space
from citadel.text.values import JSON, Dialect

IdStyle = Literal["hex", "alnum9"]


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers around reasoning. `anywhere`: they are special tokens, so reasoning may begin after content too.

    `answer` are markers that the family puts around what follows.
    """

    open: str
    close: str
    anywhere: bool = False
    answer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments as tagged parameters with plain text inside; the tool's schema gives them their types.

    `header` leads to a value: its slot `name`, and `kind` where the model says itself whether the value is a string.
    `trimmed`: a line break after the header and one before `close` belong to the frame.
    """

    header: tuple[Part, ...]
    close: str
    trimmed: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One way to write calls.

    `open` and `close` surround a block of calls; without `open` there are only lone calls. In the block, calls may
    stand in a list (`listed`), with `separator` between them outside of one. A call is `head`, arguments, `tail`; the
    head's slot is `name`, or `id` where the name is part of the model's own id. `objects`: a call may also be, or
    only be, a JSON object with name and arguments. `loose`: the head opens a call outside of a block as well.
    `bare`: this character at the start of an answer opens a block that has no marker.
    """

    open: str = ""
    close: str = ""
    separator: str = ""
    head: tuple[Part, ...] = ()
    arguments: Dialect | Tagged = JSON
    tail: tuple[Part, ...] = ()
    objects: bool = False
    listed: bool = False
    loose: bool = False
    bare: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """A family. `channels`: every message has a header that says what it is (harmony)."""

    name: str
    thinking: tuple[Thinking, ...]
    frames: tuple[Frame, ...] = ()
    id_style: IdStyle = "hex"
    channels: bool = False


_ALNUM: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def tool_call_id(style: IdStyle, random: int) -> str:
    """A call's id from at least 64 random bits."""
    if style == "hex":
        return f"chatcmpl-tool-{random & (1 << 64) - 1:016x}"
    digits: list[str] = []
    for _ in range(9):
        random, digit = divmod(random, len(_ALNUM))
        digits.append(_ALNUM[digit])
    return "".join(digits)


_THINK: Final = (Thinking("<think>", "</think>"),)
_NAME_IN_TAG: Final = Slot("name", '"')


def _dsml(name: str, block: str, space: str = "", variants: tuple[str, ...] = ()) -> Format:
    """DeepSeek's markup since V3.2; the versions differ in the block's name and in a space."""
    tag = f"｜DSML｜{space}"
    frames = [
        Frame(
            open=f"<{tag}{variant}>",
            close=f"</{tag}{variant}>",
            head=(f'<{tag}invoke name="', _NAME_IN_TAG, '">'),
            arguments=Tagged(
                (f'<{tag}parameter name="', _NAME_IN_TAG, '"', Slot("kind", ">"), ">"), f"</{tag}parameter>"
            ),
            tail=(f"</{tag}invoke>",),
            loose=True,
        )
        for variant in (block, *variants)
    ]
    return Format(name, _THINK, tuple(frames))


def _deepseek(name: str, head: tuple[Part, ...], tail: tuple[Part, ...]) -> Format:
    """DeepSeek's special tokens up to V3.1."""
    frame = Frame(
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
        head=("<｜tool▁call▁begin｜>", *head),
        tail=(*tail, "<｜tool▁call▁end｜>"),
        loose=True,
    )
    return Format(name, _THINK, (frame,))


_ALL: Final = (
    Format(
        "qwen3_xml",
        (*_THINK, Thinking("<seed:think>", "</seed:think>")),
        tuple(
            Frame(
                open=f"<{block}>",
                close=f"</{block}>",
                head=("<function=", Slot("name", ">"), ">"),
                arguments=Tagged(("<parameter=", Slot("name", ">"), ">"), "</parameter>", trimmed=True),
                tail=("</function>",),
                objects=True,
                loose=True,
            )
            for block in ("tool_call", "seed:tool_call")
        ),
    ),
    Format(
        "hermes",
        _THINK,
        tuple(
            Frame(open=f"<{block}>", close=f"</{block}>", objects=True, listed=True)
            for block in ("tool_call", "tool_calls", "TOOLCALL")
        ),
    ),
    _dsml("deepseek_v41", "calls", space=" "),
    _dsml("deepseek_v4", "tool_calls", variants=("toolcalls", "tool")),
    _dsml("deepseek_v32", "function_calls"),
    _deepseek("deepseek_v31", (Slot("name", "<"), "<｜tool▁sep｜>"), ()),
    _deepseek(
        "deepseek_v3",
        ("function", "<｜tool▁sep｜>", Slot("name", "\n`{ "), Space(), Maybe(("```json",))),
        (Maybe(("```",)), Space()),
    ),
    Format(
        "llama3_json",
        _THINK,
        (Frame(open="<|python_tag|>", separator=";", objects=True, listed=True, bare="{"),),
    ),
    Format(
        "pythonic",
        _THINK,
        tuple(
            Frame(
                open=opened,
                close=closed,
                head=(Slot("name", "("), "("),
                arguments=Dialect(bare_keys=True, assign="=", close=")"),
                listed=True,
                bare=bare,
            )
            for opened, closed, bare in (
                ("<|python_start|>", "<|python_end|>", "["),
                ("<|tool_call_start|>", "<|tool_call_end|>", ""),
            )
        ),
    ),
    Format(
        "mistral",
        (Thinking("[THINK]", "[/THINK]", anywhere=True), *_THINK),
        (
            Frame(
                open="[TOOL_CALLS]",
                head=(
                    Slot("name", "[{ "),
                    Space(),
                    Maybe(("[CALL_ID]", Slot("_", "[{"))),
                    Maybe(("[ARGS]",)),
                ),
                objects=True,
                listed=True,
            ),
        ),
        id_style="alnum9",
    ),
    Format(
        "glm47",
        _THINK,
        (
            Frame(
                open="<tool_call>",
                close="</tool_call>",
                head=(Slot("name", "\n <"),),
                arguments=Tagged(
                    ("<arg_key>", Slot("name", "<"), "</arg_key>", Space(), "<arg_value>"), "</arg_value>"
                ),
            ),
        ),
    ),
    Format(
        "kimi_k2",
        _THINK,
        (
            Frame(
                open="<|tool_calls_section_begin|>",
                close="<|tool_calls_section_end|>",
                head=("<|tool_call_begin|>", Space(), Slot("id", "<\n"), Space(), "<|tool_call_argument_begin|>"),
                tail=("<|tool_call_end|>",),
                loose=True,
            ),
        ),
    ),
    Format("harmony", (Thinking("<|channel|>analysis<|message|>", "<|end|>", anywhere=True),), channels=True),
    Format(
        "gemma4",
        (Thinking("<|channel>thought", "<channel|>", anywhere=True),),
        (
            Frame(
                open="<|tool_call>",
                close="<tool_call|>",
                head=("call:", Slot("name", "{")),
                arguments=Dialect(quote='<|"|>', bare_keys=True),
            ),
        ),
    ),
    Format(
        "functiongemma",
        _THINK,
        (
            Frame(
                open="<start_function_call>",
                close="<end_function_call>",
                head=("call:", Slot("name", "{")),
                arguments=Dialect(quote="<escape>", bare_keys=True),
            ),
        ),
    ),
    Format(
        "minimax_m2",
        _THINK,
        (
            Frame(
                open="<minimax:tool_call>",
                close="</minimax:tool_call>",
                head=('<invoke name="', _NAME_IN_TAG, '">'),
                arguments=Tagged(('<parameter name="', _NAME_IN_TAG, '">'), "</parameter>"),
                tail=("</invoke>",),
                loose=True,
            ),
        ),
    ),
    Format(
        "granite",
        (Thinking("<think>", "</think>", answer=("<response>", "</response>")),),
        (
            Frame(open="<|tool_call|>", objects=True, listed=True),
            Frame(open="<tool_call>", close="</tool_call>", objects=True, listed=True),
        ),
    ),
    Format(
        "phi4_mini",
        _THINK,
        (
            Frame(open="functools", objects=True, listed=True),
            Frame(open="<|tool_call|>", close="<|/tool_call|>", objects=True, listed=True),
        ),
    ),
    Format("plain", _THINK),
)

FORMATS: Final[Mapping[str, Format]] = {fmt.name: fmt for fmt in _ALL}


@dataclass(frozen=True, slots=True)
class Sign:
    """A text that holds all of `has` and none of `lacks` means the format."""

    format: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


_SIGNS: Final = (
    # From the particular to the common: many templates hold `<tool_call>`, and mean different things by it.
    Sign("harmony", ("<|channel|>", "<|message|>", "<|start|>")),
    Sign("gemma4", ("<|tool_call>", "<tool_call|>")),
    Sign("functiongemma", ("<start_function_call>",)),
    Sign("deepseek_v41", ("｜DSML｜", " invoke name=")),
    Sign("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    Sign("deepseek_v32", ("｜DSML｜", "function_calls>")),
    Sign("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    Sign("deepseek_v31", ("<｜tool▁sep｜>",)),
    Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Sign("minimax_m2", ("minimax:tool_call",)),
    Sign("glm47", ("<arg_key>", "<arg_value>")),
    Sign("qwen3_xml", ("tool_call>", "<function=", "<parameter=")),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("phi4_mini", ("functools",)),
    Sign("phi4_mini", ("<|tool|>", "<|/tool|>")),
    Sign("granite", ("<|tool_call|>",)),
    Sign("pythonic", ("<|python_start|>",)),
    Sign("pythonic", ("<|tool_call_start|>",)),
    Sign("pythonic", ("<|tool_list_start|>",)),
    Sign("pythonic", ("[func_name1(",)),
    Sign("hermes", ("<tool_call>", "</tool_call>"), lacks=("<invoke",)),
    Sign("hermes", ("<tool_calls>", "</tool_calls>")),
    Sign("hermes", ("<TOOLCALL>",)),
    Sign("llama3_json", ("<|python_tag|>",), lacks=("<function=",)),
    Sign("llama3_json", ("<|start_header_id|>", '"parameters"')),
)


def recognise(template: str | None, special_tokens: Collection[str]) -> Format:
    """The format of a model by its chat template, else by its special tokens; `plain` where neither tells."""
    for text in (template or "", "\n".join(special_tokens)):
        for sign in _SIGNS:
            if all(word in text for word in sign.has) and not any(word in text for word in sign.lacks):
                return FORMATS[sign.format]
    return FORMATS["plain"]
