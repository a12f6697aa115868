"""Against vLLM's own parsers, on well-formed outputs made at random: equal, but for the faults listed here.

Harmony is not compared: its parser there reads token ids of a vocabulary that it fetches. Content is compared without
the whitespace at its ends, which vLLM strips in some parsers and leaves in others.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from tests.text.harness import TOOLS, Answer, Calls, events_of, fold
from tests.text.styles import STYLES, Do, Part, Say, Style, Think, plain

NUMBER = 60
COMPARED = sorted(STYLES.keys() - {"harmony"})
TEXTS = (
    "Oslo",
    "New York",
    "a 'b' \"c\"",
    "x\ny",
    "日本 😀",
    "1",
    "007",
    "true",
    "null",
    '{"a": 1}',
    "[1]",
    "a, b: c",
    "C:\\temp",
)
TEXTS += ("<b>&amp;</b>", "", "  pad  ", "100%", "it's")

# vLLM follows no `$ref`, so here the one tool that has one says the same without it.
_parameters = dict(TOOLS[3].parameters or {})
_parameters["properties"] = {**_parameters["properties"], "where": _parameters.pop("$defs")["place"]}
PLAIN_TOOLS = (*TOOLS[:3], replace(TOOLS[3], parameters=_parameters))


@dataclass(frozen=True, slots=True)
class Output:
    raw: str
    words: bool
    calls: Calls


@dataclass(frozen=True, slots=True)
class Fault:
    """Where vLLM 0.32 differs, and why."""

    why: str
    concerns: Callable[[Output], bool] = lambda _: True


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts(each)]


def _like_json(output: Output) -> bool:
    return any(
        text in ("1", "true", "null", '{"a": 1}', "[1]") for _, values in output.calls for text in _texts(values)
    )


WHOLE: dict[str, tuple[Fault, ...]] = {
    "phi4_mini": (
        Fault("text before the calls is dropped", lambda output: output.words),
        Fault("the list is taken to end at the first bracket", lambda output: "]" in output.raw[:-1]),
    ),
    "llama3_json": (Fault("text before the calls is dropped", lambda output: output.words),),
    "pythonic": (Fault("calls are read only where nothing but a list was written", lambda output: output.words),),
    "functiongemma": (Fault("a string that looks like JSON becomes what it looks like", _like_json),),
}
STREAMED: dict[str, tuple[Fault, ...]] = {
    "phi4_mini": (Fault("nothing is streamed"),),
    "deepseek_v3": (Fault("its markers are looked for by token id only"),),
    "deepseek_v31": (Fault("its markers are looked for by token id only"),),
    "mistral": (Fault("arguments lack their last brace, which the server adds"),),
    "functiongemma": (Fault("arguments after the first are written behind the closing brace"),),
    "llama3_json": (
        Fault("a tag behind text is text", lambda output: output.words),
        Fault("arguments of several calls get mixed up or lost", lambda output: len(output.calls) > 1),
        Fault("empty arguments are not streamed", lambda output: any(not values for _, values in output.calls)),
    ),
    "pythonic": WHOLE["pythonic"],
    "granite": (Fault("a number written 10.0 breaks the arguments", lambda output: "10.0" in output.raw),),
}


@cache
def peer() -> ModuleType:
    pytest.importorskip("vllm", reason="vllm is not installed, there is nothing to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.text import peer as module  # noqa: PLC0415 - takes seconds, and vllm may be missing
    return module


def style_of(fmt: str) -> Style:
    """FunctionGemma marks every value, numbers too; ours are read with marks and without."""
    if fmt != "functiongemma":
        return STYLES[fmt]
    return replace(
        STYLES[fmt],
        block=lambda calls: "".join(
            f"<start_function_call>call:{name}{{"
            + ",".join(f"{key}:<escape>{plain(value)}<escape>" for key, value in values.items())
            + "}<end_function_call>"
            for name, values in calls
        ),
    )


def outputs(fmt: str) -> list[Output]:
    made: list[Output] = []
    for number in range(NUMBER):
        chance = random.Random(number)
        parts: list[Part] = []
        if chance.random() < 0.4:
            parts.append(Say(chance.choice(("Let me look.", "I need this: a < b.", "Zuerst: 😀"))))
        names = [chance.choice(("get_weather", "write", "ping", "search")) for _ in range(chance.randint(1, 3))]
        calls = tuple((name, arguments(chance, name)) for name in names)
        made.append(Output(style_of(fmt).render([*parts, Do(*calls)]), bool(parts), calls))
    return made


def arguments(chance: random.Random, name: str) -> dict[str, Any]:
    text = lambda: chance.choice(TEXTS)  # noqa: E731
    match name:
        case "ping":
            return {}
        case "get_weather":
            return {"city": text(), **({"days": chance.randint(-3, 99)} if chance.random() < 0.7 else {})}
        case "write":
            return {"path": text(), "text": " ".join(text() for _ in range(3))}
        case _:
            values = {
                "query": text(),
                "limit": chance.choice((1, 20, None)),
                "exact": chance.random() < 0.5,
                "score": chance.choice((0.5, -2.25, 10.0)),
                "where": {"lat": 1.5, "zoom": 3, "name": text()},
                "tags": [text() for _ in range(chance.randint(0, 3))],
            }
            return {key: value for key, value in values.items() if chance.random() < 0.6}


def same(ours: Answer, theirs: Answer) -> bool:
    return ours.calls == theirs.calls and (ours.content or "").strip() == (theirs.content or "").strip()


@pytest.mark.parametrize("fmt", COMPARED)
def test_whole_outputs(fmt: str) -> None:
    compare(fmt, WHOLE.get(fmt, ()), lambda their, raw: their.whole(raw))


@pytest.mark.parametrize("fmt", COMPARED)
def test_streamed_outputs(fmt: str) -> None:
    if any(fault.concerns(Output("", False, ())) for fault in STREAMED.get(fmt, ())):
        pytest.skip(f"vllm: {STREAMED[fmt][0].why}")
    compare(
        fmt,
        STREAMED.get(fmt, ()),
        lambda their, raw: their.streamed([raw[at : at + 5] for at in range(0, len(raw), 5)]),
    )


def compare(fmt: str, faults: tuple[Fault, ...], read: Callable[[Any, str], Answer]) -> None:
    their = peer().Peer(fmt, PLAIN_TOOLS)
    compared = 0
    for output in outputs(fmt):
        ours = fold(events_of(fmt, [output.raw], tools=PLAIN_TOOLS))
        assert ours.calls == output.calls
        if not any(fault.concerns(output) for fault in faults):
            assert same(ours, read(their, output.raw)), output.raw
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("fmt", [fmt for fmt in COMPARED if fmt in WHOLE])
def test_listed_faults_are_still_there(fmt: str) -> None:
    """An exception that no longer excuses anything must go."""
    their = peer().Peer(fmt, PLAIN_TOOLS)
    for fault in WHOLE[fmt]:
        concerned = [output for output in outputs(fmt) if fault.concerns(output)]
        ours = [fold(events_of(fmt, [output.raw], tools=PLAIN_TOOLS)) for output in concerned]
        theirs = [their.whole(output.raw) for output in concerned]
        assert not all(same(one, other) for one, other in zip(ours, theirs, strict=True)), fault.why


REASONING = ("qwen3_xml", "hermes", "deepseek_v3", "glm47", "kimi_k2", "minimax_m2", "gemma4", "mistral")


@pytest.mark.parametrize("fmt", REASONING)
@pytest.mark.parametrize("thought", ["Hm.", "First a < b,\n\nthen c."])
def test_reasoning(fmt: str, thought: str) -> None:
    raw = STYLES[fmt].render([Think(thought), Say("Hello.")])
    reasoning, content = peer().Peer(fmt, PLAIN_TOOLS).reasoning(raw)
    ours = fold(events_of(fmt, [raw], tools=PLAIN_TOOLS))
    assert ((reasoning or "").strip(), (content or "").strip()) == (ours.reasoning, ours.content)
