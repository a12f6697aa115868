"""Each format as a model writes it: from parts (reasoning, words, calls) to raw output, for the shared cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
Block = Callable[[Sequence[Call]], str]


@dataclass(frozen=True, slots=True)
class Think:
    text: str


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Do:
    calls: tuple[Call, ...]

    def __init__(self, *calls: Call) -> None:
        object.__setattr__(self, "calls", calls)


Part = Think | Say | Do


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else js(value)


@dataclass(frozen=True, slots=True)
class Style:
    """How one format writes things. `opener` and `closer` are markers of its calls, for texts that only mention them.

    `after` writes calls where text comes before them, if that differs. `strings_typed`: the notation itself tells a
    string from a number.
    """

    block: Block
    opener: str
    closer: str
    after: Block | None = None
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    strings_typed: bool = True
    between: str = "\n"

    def render(self, parts: Sequence[Part], *, opened: bool = False) -> str:
        """`opened`: the prompt ends inside reasoning, so its marker isn't written again."""
        raw = ""
        for number, part in enumerate(parts):
            if isinstance(part, Say):
                raw += part.text
            elif isinstance(part, Think):
                raw += ("" if opened and number == 0 else self.think[0]) + part.text + self.think[1]
            else:
                raw += (self.after or self.block if raw else self.block)(part.calls)
        return raw


class Harmony(Style):
    """Every part is a message with a header of its own; the prompt ends inside the first header."""

    def render(self, parts: Sequence[Part], *, opened: bool = False) -> str:
        messages: list[str] = []
        for part in parts:
            if isinstance(part, Say):
                messages.append(f"<|channel|>final<|message|>{part.text}<|end|>")
            elif isinstance(part, Think):
                messages.append(f"<|channel|>analysis<|message|>{part.text}<|end|>")
            else:
                messages += [
                    f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{js(values)}<|call|>"
                    for name, values in part.calls
                ]
        raw = "<|start|>assistant".join(messages)
        return raw.removeprefix("<|channel|>analysis<|message|>") if opened else raw


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [js({"name": name, key: values}) for name, values in calls]


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in _objects(calls))


def _qwen(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        values = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in call[1].items())
        return f"<tool_call>\n<function={call[0]}>\n{values}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


def _dsml(block: str, space: str = "") -> Block:
    tag = f"｜DSML｜{space}"

    def write(calls: Sequence[Call]) -> str:
        text = f"<{tag}{block}>\n"
        for name, values in calls:
            text += f'<{tag}invoke name="{name}">\n'
            for key, value in values.items():
                kind = "true" if isinstance(value, str) else "false"
                text += f'<{tag}parameter name="{key}" string="{kind}">{plain(value)}</{tag}parameter>\n'
            text += f"</{tag}invoke>\n"
        return f"{text}</{tag}{block}>"

    return write


def _minimax(calls: Sequence[Call]) -> str:
    text = "<minimax:tool_call>\n"
    for name, values in calls:
        text += f'<invoke name="{name}">\n'
        text += "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in values.items())
        text += "</invoke>\n"
    return f"{text}</minimax:tool_call>"


def _glm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in values.items())
        + "</tool_call>"
        for name, values in calls
    )


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{js(values)}\n```<｜tool▁call▁end｜>"
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{js(values)}<｜tool▁call▁end｜>" for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{js(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{js(values)}" for name, values in calls)


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _pythonic(calls: Sequence[Call]) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls
        )
        + "]"
    )


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(inner, quote) for inner in value) + "]"
    return js(value)


def _gemma(opened: str, closed: str, quote: str) -> Block:
    return lambda calls: "".join(f"{opened}call:{name}{_gemma_value(values, quote)}{closed}" for name, values in calls)


def _listed(opener: str) -> Block:
    return lambda calls: f"{opener}[{', '.join(_objects(calls))}]"


STYLES: dict[str, Style] = {
    "qwen3_xml": Style(_qwen, "<tool_call>", "</parameter>", strings_typed=False),
    "hermes": Style(_hermes, "<tool_call>", "</tool_call>"),
    "deepseek_v41": Style(
        _dsml("calls", " "),
        "<｜DSML｜ calls>",
        "</｜DSML｜ parameter>",
        think=("<think>", "</think>"),
        strings_typed=False,
    ),
    "deepseek_v4": Style(
        _dsml("tool_calls"),
        "<｜DSML｜tool_calls>",
        "</｜DSML｜parameter>",
        think=("<think>", "</think>"),
        strings_typed=False,
    ),
    "deepseek_v32": Style(
        _dsml("function_calls"),
        "<｜DSML｜function_calls>",
        "</｜DSML｜invoke>",
        think=("<think>", "</think>"),
        strings_typed=False,
    ),
    "deepseek_v31": Style(
        _deepseek_v31, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", think=("<think>", "</think>")
    ),
    "deepseek_v3": Style(_deepseek_v3, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"),
    "llama3_json": Style(_llama, "<|python_tag|>", "; ", after=lambda calls: "<|python_tag|>" + _llama(calls)),
    "pythonic": Style(
        _pythonic, "<|python_start|>", ")]", after=lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>"
    ),
    "mistral": Style(_mistral, "[TOOL_CALLS]", "[TOOL_CALLS]", think=("[THINK]", "[/THINK]")),
    "glm47": Style(_glm, "<tool_call>", "</arg_value>", strings_typed=False),
    "kimi_k2": Style(_kimi, "<|tool_calls_section_begin|>", "<|tool_call_end|>"),
    "harmony": Harmony(lambda _: "", "", "<|call|>"),
    "gemma4": Style(
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        "<|tool_call>",
        "<tool_call|>",
        think=("<|channel>thought\n", "\n<channel|>"),
    ),
    "functiongemma": Style(
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>",
        "<end_function_call>",
    ),
    "minimax_m2": Style(_minimax, "<minimax:tool_call>", "</parameter>", strings_typed=False),
    "granite": Style(_listed("<|tool_call|>"), "<|tool_call|>", "]"),
    "phi4_mini": Style(_listed("functools"), "functools", "}]"),
}
