"""Cases that every format with calls must pass, written in parts; what each must give is written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.text.harness import TOOLS, Answer, Case, ToolSpec
from tests.text.styles import STYLES, Do, Harmony, Part, Say, Style, Think, js

OSLO = ("get_weather", {"city": "Oslo", "days": 2})
PARIS = ("get_weather", {"city": "Paris", "days": 10})
PING: tuple[str, dict[str, Any]] = ("ping", {})


@dataclass(frozen=True, slots=True)
class Shared:
    """`content` or `reasoning` RAW stands for the raw text itself. `typed`: only where the notation types strings."""

    name: str
    parts: tuple[Part, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str | None = None
    reasoning: str | None = None
    thinking: bool = False
    tools: tuple[ToolSpec, ...] = TOOLS
    typed: bool = False


RAW = "\0raw"

SHARED = (
    Shared("one call", (Do(OSLO),), (OSLO,)),
    Shared("two calls in one block", (Do(OSLO, PARIS),), (OSLO, PARIS)),
    Shared("the same call three times", (Do(PING, PING, PING),), (PING, PING, PING)),
    Shared("no arguments", (Do(PING),), (PING,)),
    Shared("no arguments, then some", (Do(PING, OSLO),), (PING, OSLO)),
    Shared("words, then a call", (Say("Let me look."), Do(OSLO)), (OSLO,), content="Let me look."),
    Shared("a call, then words", (Do(OSLO), Say("Done.")), (OSLO,), content="Done."),
    Shared("words around a call", (Say("One "), Do(PING), Say(" two")), (PING,), content="One  two"),
    Shared(
        "nested values",
        (Do(("search", {"query": "x", "where": {"lat": 59.9, "zoom": 3, "name": "a b"}, "tags": ["a", "", "c d"]})),),
        (("search", {"query": "x", "where": {"lat": 59.9, "zoom": 3, "name": "a b"}, "tags": ["a", "", "c d"]}),),
    ),
    Shared(
        "empty values",
        (Do(("search", {"query": "", "where": {}, "tags": []})),),
        (("search", {"query": "", "where": {}, "tags": []}),),
    ),
    Shared(
        "numbers, booleans, null",
        (Do(("search", {"limit": None, "exact": True, "score": -0.5})),),
        (("search", {"limit": None, "exact": True, "score": -0.5}),),
    ),
    Shared(
        "a big number and a false",
        (Do(("search", {"limit": 123456789012345678901234567890, "exact": False, "score": 1e-7})),),
        (("search", {"limit": 123456789012345678901234567890, "exact": False, "score": 1e-7}),),
    ),
    Shared(
        "unicode of every width",
        (Do(("write", {"path": "naïve/日本.txt", "text": "e\u0301 👩\u200d💻 \u2028 ｜▁ Ω"})),),
        (("write", {"path": "naïve/日本.txt", "text": "e\u0301 👩\u200d💻 \u2028 ｜▁ Ω"}),),
    ),
    Shared(
        "quotes, backslashes and line breaks",
        (Do(("write", {"path": 'C:\\t"x"', "text": "a\n\n\tb 'c'\\n"})),),
        (("write", {"path": 'C:\\t"x"', "text": "a\n\n\tb 'c'\\n"}),),
    ),
    Shared(
        "brackets in a string",
        (Do(("write", {"text": '}}]){"a": [1, {"b'})),),
        (("write", {"text": '}}]){"a": [1, {"b'}),),
    ),
    Shared("a number that is a string", (Do(("write", {"path": "007"})),), (("write", {"path": "007"}),)),
    Shared("words of JSON that are strings", (Do(("write", {"text": "null"})),), (("write", {"text": "null"}),)),
    Shared(
        "a nullable string that is long",
        (Do(("search", {"note": "nothing " * 9})),),
        (("search", {"note": "nothing " * 9}),),
    ),
    Shared("a nullable string that is null", (Do(("search", {"note": None})),), (("search", {"note": None}),)),
    Shared(
        "a string where a number is asked for",
        (Do(("get_weather", {"city": "Oslo", "days": "2"})),),
        (OSLO,),
    ),
    Shared(
        "a string that is no number after all",
        (Do(("get_weather", {"days": "two"})),),
        (("get_weather", {"days": "two"}),),
    ),
    Shared(
        "nested strings where numbers are asked for",
        (Do(("search", {"where": {"zoom": "3", "lat": "1.5", "name": "7"}})),),
        (("search", {"where": {"zoom": 3, "lat": 1.5, "name": "7"}}),),
    ),
    Shared("a string for a boolean", (Do(("search", {"exact": "True"})),), (("search", {"exact": True}),)),
    Shared(
        "a string where string or number may stand",
        (Do(("search", {"key": "12"})),),
        (("search", {"key": "12"}),),
        typed=True,
    ),
    Shared("an argument that was not declared", (Do(("ping", {"extra": "yes"})),), (("ping", {"extra": "yes"}),)),
    Shared("a function that was not offered", (Do(("fly", {"to": "Oslo"})),), content=RAW),
    Shared("a function whose name begins like one", (Do(("pin", {})),), content=RAW),
    Shared("a function whose name goes on", (Do(("pings", {})),), content=RAW),
    Shared("no tools at all", (Do(OSLO),), content=RAW, tools=()),
    Shared(
        "words and nothing else", (Say("Hello, a < b and [1] {2} \n\n x."),), content="Hello, a < b and [1] {2} \n\n x."
    ),
    Shared("whitespace is kept", (Say("  a \n b\n\n"),), content="  a \n b\n\n"),
    Shared("reasoning, then words", (Think("Hm.\nYes."), Say("Hello.")), content="Hello.", reasoning="Hm.\nYes."),
    Shared("reasoning, then a call", (Think("Hm."), Do(OSLO)), (OSLO,), reasoning="Hm."),
    Shared(
        "reasoning, words, calls",
        (Think("I must look."), Say("Looking. "), Do(OSLO, PING)),
        (OSLO, PING),
        content="Looking. ",
        reasoning="I must look.",
    ),
    Shared("reasoning opened by the prompt", (Think("Hm."), Say("Hi")), content="Hi", reasoning="Hm.", thinking=True),
    Shared(
        "reasoning opened by the prompt, then a call", (Think("Hm."), Do(PING)), (PING,), reasoning="Hm.", thinking=True
    ),
    Shared("empty reasoning", (Think(""), Say("Hi")), content="Hi"),
    Shared("a lone bracket", (Say("<"),), content="<"),
    Shared("nothing", (), content=None),
)


def shared_cases(fmt: str) -> Iterator[Case]:
    style = STYLES[fmt]
    for case in SHARED:
        if case.typed and not style.strings_typed:
            continue
        raw = style.render(case.parts, opened=case.thinking)
        content = raw if case.content == RAW else case.content
        if content is not None and isinstance(style, Harmony) and case.content == RAW:
            # What ends a message is no text, whatever the message was.
            content = raw.removesuffix("<|call|>")
        yield Case(
            case.name, raw, Answer(case.reasoning, content, case.calls), thinking=case.thinking, tools=case.tools
        )
    if not isinstance(style, Harmony):
        yield from _about_markers(style)


def _about_markers(style: Style) -> Iterator[Case]:
    """Texts that only look like calls, and values that hold what surrounds them."""
    mention = f"Write {style.opener} to call, and {style.closer} after it."
    yield Case("prose that mentions the markers", mention, Answer(content=mention))
    raw = style.render((Say(mention), Do(PING)))
    yield Case("a call after such prose", raw, Answer(content=mention, calls=(PING,)))
    thoughts = f"I could write {style.opener} here"
    raw = style.render((Think(thoughts), Say("No.")))
    yield Case("a marker in reasoning", raw, Answer(reasoning=thoughts, content="No."))
    raw = style.think[0] + "So: " + style.render((Say("x"), Do(PING)))[1:]
    yield Case("a call in open reasoning", raw, Answer(reasoning="So: ", calls=(PING,)))
    raw = raw.removeprefix(style.think[0])
    yield Case(
        "a call in reasoning that the prompt opened", raw, Answer(reasoning="So: ", calls=(PING,)), thinking=True
    )
    raw = style.think[0] + style.render((Say("x"), Do(PING)))[1:] + style.think[1].strip() + "Done"
    yield Case("reasoning closed after the call that ended it", raw, Answer(content="Done", calls=(PING,)))
    text = f"a {style.opener} b {style.opener[:-1]} c </think> <think>"
    raw = style.render((Do(("write", {"text": text})),))
    yield Case("opening markers in a value", raw, Answer(calls=(("write", {"text": text}),)))
    text = f"a {style.closer} b {style.closer[:-1]} c"
    raw = style.render((Do(("write", {"text": text}), PING),))
    yield Case("closing markers in a value", raw, Answer(calls=(("write", {"text": text}), PING)))
    half = style.opener[: len(style.opener) // 2]
    yield Case("half a marker", f"{half} and {half}", Answer(content=f"{half} and {half}"))
    yield Case("half a marker at the end", f"so {half}", Answer(content=f"so {half}"), cut=True)
    raw = style.opener
    yield Case("a marker and nothing more", raw, Answer(content=raw), cut=True)
    raw = style.render((Do(("fly", {}), PING),))
    calls = style.render((Say("x"), Do(PING)))
    yield Case(
        "a marker right before a call",
        style.opener + " " + calls[1:],
        Answer(content=style.opener + " ", calls=(PING,)),
    )


def arguments_of(values: dict[str, Any]) -> str:
    return js(values)
