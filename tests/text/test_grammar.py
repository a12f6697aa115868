"""What the grammar of a request lets through, in every format; and that the machine reads it back as it was meant."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from typing import Any

import jsonschema
import pytest

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, NamedTool, ToolSpec
from citadel.text.formats import FORMATS
from citadel.text.grammar import Grammar, compile_grammar
from citadel.text.machine import Machine
from tests.text.grammar_oracle import calls_in
from tests.text.grammar_walk import Vocabulary, accepts, vocabulary_of, walk
from tests.text.harness import TOOLS, Answer, fold, tool
from tests.text.styles import STYLES, Call, Do, Part, Say, Think

WEATHER: Call = ("get_weather", {"city": "Oslo é", "days": 2})
PING: Call = ("ping", {})
SEARCH: Call = (
    "search",
    {
        "query": "a <b> c",
        "limit": None,
        "exact": True,
        "score": 1.5,
        "where": {"lat": 1.5, "zoom": 3, "name": "x"},
        "tags": ["p", "q"],
        "mode": "fast",
    },
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ANSWER = {"type": "json_schema", "schema": SCHEMA, "strict": True}
ANY = {"type": "json_object"}
SCHEMAS = {each.name: each.parameters for each in TOOLS}
NAMED = NamedTool("get_weather")


def asking(**fields: Any) -> ChatRequest:
    return ChatRequest("m", "m", (), **{"tools": TOOLS, **fields})


@cache
def vocabulary(fmt: str, special: bool) -> Vocabulary:
    return vocabulary_of(FORMATS[fmt], special=special)


def compiled(fmt: str, known: Vocabulary, *, opened: bool = False, **fields: Any) -> Grammar:
    made = compile_grammar(asking(**fields), FORMATS[fmt], in_reasoning=opened, token_id=known.token_id)
    assert made is not None
    return made


def understood(fmt: str, text: str, *, opened: bool = False, tools: tuple[ToolSpec, ...] = TOOLS) -> Answer:
    numbers = count()
    machine = Machine(FORMATS[fmt], tools, in_reasoning=opened, new_id=lambda: f"id{next(numbers)}")
    answer = fold(machine.feed(text) + machine.finish(cut=False))
    assert machine.complaints == []
    return answer


WRITTEN: list[tuple[str, list[Part], dict[str, Any], bool, bool]] = [
    ("required: calls", [Do(WEATHER, PING, SEARCH)], {"tool_choice": "required"}, False, True),
    ("required: reasoning first", [Think("Hm < so"), Do(WEATHER)], {"tool_choice": "required"}, False, True),
    ("required: opened reasoning", [Think("Hm < so"), Do(WEATHER)], {"tool_choice": "required"}, True, True),
    ("required: no text", [Say("Hello")], {"tool_choice": "required"}, False, False),
    ("required: not only reasoning", [Think("Hm")], {"tool_choice": "required"}, True, False),
    ("required: no answer", [Do(WEATHER)], {"tool_choice": "required", "response_format": ANSWER}, False, True),
    ("named: its call", [Do(WEATHER)], {"tool_choice": NAMED}, False, True),
    ("named: no other", [Do(PING)], {"tool_choice": NAMED}, False, False),
    ("named: one call", [Do(WEATHER, WEATHER)], {"tool_choice": NAMED}, False, False),
    ("auto: text", [Say("Hello <b> there\n")], {}, False, True),
    ("auto: calls", [Do(WEATHER, PING, SEARCH)], {}, False, True),
    ("auto: text, then a call", [Say("Let me see.\n"), Do(WEATHER)], {}, False, True),
    ("auto: reasoning, then a call", [Think("Hm"), Do(WEATHER)], {}, False, True),
    ("auto: opened reasoning, then text", [Think("Hm"), Say("Hello")], {}, True, True),
    ("auto: arguments of another type", [Do(("get_weather", {"city": "x", "days": "many"}))], {}, False, False),
    ("auto: arguments missing", [Do(("get_weather", {"days": 2}))], {}, False, False),
    ("auto: arguments unknown", [Do(("ping", {"x": 2}))], {}, False, False),
    ("single: one call", [Do(SEARCH)], {"parallel_tool_calls": False}, False, True),
    ("single: not two", [Do(WEATHER, PING)], {"parallel_tool_calls": False}, False, False),
    ("none: text", [Say("Hello")], {"tool_choice": "none"}, False, True),
    ("none: no call", [Do(WEATHER)], {"tool_choice": "none"}, False, False),
    ("answer or calls: calls", [Do(WEATHER)], {"response_format": ANSWER}, False, True),
    ("answer or calls: an answer", [Say('{"n": 17}')], {"response_format": ANSWER}, False, True),
    ("answer or calls: reasoned", [Think("Hm"), Say('{"n": 17}')], {"response_format": ANSWER}, True, True),
    ("answer or calls: no text", [Say("Hello")], {"response_format": ANSWER}, False, False),
    ("answer: another type", [Say('{"n": "x"}')], {"response_format": ANSWER, "tools": ()}, False, False),
    ("answer: any object", [Say('{"a": [1, {}]}')], {"response_format": ANY, "tools": ()}, False, True),
    ("answer: no list", [Say("[1]")], {"response_format": ANY, "tools": ()}, False, False),
    ("answer: no endless space", [Say('{"n":  17}')], {"response_format": ANSWER, "tools": ()}, False, False),
]  # fmt: skip


@pytest.mark.parametrize("fmt", STYLES)
@pytest.mark.parametrize("special", [True, False])
def test_the_native_notation_passes_and_what_was_not_asked_for_does_not(fmt: str, special: bool) -> None:
    known = vocabulary(fmt, special)
    wrong: list[str] = []
    for name, parts, fields, opened, wanted in WRITTEN:
        if (fmt == "harmony" and opened) or (
            fmt == "mistral" and not special and any(isinstance(p, Do) for p in parts)
        ):
            continue  # its prompt never opens reasoning; and without its tokens a model writes lists of objects
        text = STYLES[fmt].render(parts, opened=opened)
        if fmt == "harmony" and isinstance(parts[0], Say) and len(parts) > 1:
            text = text.replace("final<|message|>", "commentary<|message|>", 1)
        if accepts(compiled(fmt, known, opened=opened, **fields).text, known, text) is not wanted:
            wrong.append(f"{name}: {text}")
    assert wrong == []


@pytest.mark.parametrize("fmt", STYLES)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"parallel_tool_calls": False}, {"response_format": ANSWER}],
    ids=["required", "named", "single", "answer"],
)
def test_what_passes_is_read_back_and_valid(fmt: str, special: bool, fields: dict[str, Any]) -> None:
    known = vocabulary(fmt, special)
    grammar = compiled(fmt, known, **fields)
    ended = 0
    for seed in range(8):
        out = walk(grammar.text, known, seed, steps=600)
        if not out.ended:
            continue
        ended += 1
        answer = understood(fmt, out.text)
        for name, arguments in answer.calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        if "tool_choice" in fields:
            assert answer.calls, out.text
            assert answer.content is None, out.text
        if fields.get("tool_choice") == NAMED:
            assert [name for name, _ in answer.calls] == ["get_weather"]
        if "parallel_tool_calls" in fields:
            assert len(answer.calls) <= 1
        if "response_format" in fields and not answer.calls:
            jsonschema.validate(json.loads(answer.content or ""), SCHEMA)
    assert ended


@pytest.mark.parametrize("fmt", STYLES)
def test_arguments_are_exactly_those_that_were_written(fmt: str) -> None:
    known = vocabulary(fmt, True)
    grammar = compile_grammar(
        asking(tool_choice="required"), FORMATS[fmt], in_reasoning=False, token_id=known.token_id, thinking=()
    )
    assert grammar is not None
    seen = 0
    for seed in range(20):
        out = walk(grammar.text, known, seed, steps=500)
        if out.ended:
            calls = list(understood(fmt, out.text).calls)
            assert calls == calls_in(fmt, out.text, SCHEMAS), out.text
            seen += len(calls)
    assert seen >= 10


def test_an_output_without_tools_and_schema_is_free() -> None:
    for fmt in FORMATS.values():
        assert compile_grammar(asking(tools=()), fmt, in_reasoning=False, token_id=lambda _: None) is None


def test_a_model_that_cannot_think_is_not_offered_to() -> None:
    known = vocabulary("hermes", False)
    request = asking(tool_choice="required")
    grammar = compile_grammar(request, FORMATS["hermes"], in_reasoning=False, token_id=known.token_id, thinking=())
    assert grammar is not None
    assert not accepts(grammar.text, known, STYLES["hermes"].render([Think("Hm"), Do(PING)]))
    assert accepts(grammar.text, known, STYLES["hermes"].render([Do(PING)]))


@pytest.mark.parametrize("fmt", ["qwen3_xml", "glm47", "kimi_k2", "hermes"])
def test_a_call_may_end_reasoning_that_is_not_closed(fmt: str) -> None:
    known = vocabulary(fmt, True)
    text = "Hm, " + STYLES[fmt].render([Do(WEATHER)])
    for choice in ("auto", "required"):
        assert accepts(compiled(fmt, known, opened=True, tool_choice=choice).text, known, text)
    assert not accepts(compiled(fmt, known, opened=True, tool_choice="none").text, known, text)
    assert understood(fmt, text, opened=True) == Answer(reasoning="Hm, ", calls=(WEATHER,))


@pytest.mark.parametrize("fmt", ["qwen3_xml", "minimax_m2", "deepseek_v32", "glm47"])
def test_text_of_a_union_never_looks_like_the_other_type(fmt: str) -> None:
    known = vocabulary(fmt, True)
    ranged = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 10, "maximum": 19}]}
    for schema, passing, refused in (
        (ranged, ("seven", "7 up"), (7,)),
        ({"type": ["string", "integer"]}, ("seven", 17), (1.5,)),
        ({"type": ["string", "boolean", "null"]}, ("null or so", True, None), ()),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]}, ("x [", [None]), ([1],)),
        ({"enum": ["7", "seven", 8], "type": ["string", "integer"]}, ("seven", 8), (7,)),
    ):
        grammar = compiled(fmt, known, tool_choice="required", tools=(tool("ping", ("v",), v=schema),))
        for value in (*passing, *refused):
            text = STYLES[fmt].render([Do(("ping", {"v": value}))])
            assert accepts(grammar.text, known, text) is (value in passing), value


def test_calls_cannot_be_required_in_a_format_without_calls() -> None:
    with pytest.raises(BadRequest, match="tool_choice") as refused:
        compile_grammar(asking(tool_choice="required"), FORMATS["plain"], in_reasoning=False, token_id=lambda _: None)
    assert refused.value.fields["param"] == "tool_choice"


@pytest.mark.parametrize("fmt", ["mistral", "gemma4", "qwen3_xml"])
def test_reasoning_after_text_is_free_too(fmt: str) -> None:
    known = vocabulary(fmt, True)
    text = STYLES[fmt].render([Say("Well. "), Think("Hm"), Say("Yes.")])
    for fields in ({}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        assert accepts(compiled(fmt, known, **fields).text, known, text)


def test_a_name_that_the_frame_cannot_hold_is_refused() -> None:
    odd = tool('a">b')
    with pytest.raises(BadRequest, match="names"):
        compiled("minimax_m2", vocabulary("minimax_m2", True), tool_choice="required", tools=(odd,))
    known = vocabulary("hermes", True)
    grammar = compiled("hermes", known, tool_choice="required", tools=(odd,))
    assert accepts(grammar.text, known, STYLES["hermes"].render([Do(('a">b', {}))]))
