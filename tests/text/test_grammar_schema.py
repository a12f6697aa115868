"""JSON Schema in grammars: what is enforced is, what cannot be is named, and hostile schemas cost little."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jsonschema
import pytest

from citadel.errors import BadRequest
from citadel.messages import ChatRequest, ToolSpec
from citadel.text.formats import FORMATS
from citadel.text.grammar import Grammar, compile_grammar
from citadel.text.grammar_keywords import repetitions
from citadel.text.grammar_schema import enforced
from tests.text.grammar_walk import Vocabulary, accepts, vocabulary_of, walk
from tests.text.harness import events_of, fold

KNOWN = Vocabulary((), special=False)

KEYWORDS: dict[str, Any] = {
    "type": {"type": ["integer", "null", "boolean"]},
    "enum": {"enum": ["a b", 17, None, True, {"k": [1]}, 2.5]},
    "const": {"const": {"k": ["x", 1]}},
    "const of null": {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"const": "x"}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"enum": ["x", "y"]}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 99}]},
    "properties": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}},
    "required": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x": {"type": "null"}},
        "additionalProperties": False,
    },
    "minProperties": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "maxProperties": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "items": {"type": "array", "items": {"type": "integer"}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "items": False},
    "minItems": {"type": "array", "items": {"type": "null"}, "minItems": 2},
    "maxItems": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
    "minLength": {"type": "string", "minLength": 3},
    "maxLength": {"type": "string", "maxLength": 3},
    "pattern": {"type": "string", "pattern": "^[a-c]+-\\d{2,3}$"},
    "pattern inside": {"type": "string", "pattern": "b[0-9]"},
    "minimum": {"type": "integer", "minimum": -3, "maximum": 120},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "$ref": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
    "recursion": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}},
        },
    },
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "email", "ipv4", "uuid")
    },
}  # fmt: skip


def answering(schema: Any, *, strict: bool = True) -> Grammar:
    wanted = {"type": "json_schema", "schema": schema, "strict": strict}
    request = ChatRequest("m", "m", (), response_format=wanted)
    made = compile_grammar(request, FORMATS["plain"], in_reasoning=False, token_id=lambda _: None, thinking=())
    assert made is not None
    return made


def calling(fmt: str, schema: Any, known: Vocabulary, *, strict: bool = False) -> Grammar:
    tools = (ToolSpec("f", parameters=schema, strict=strict),)
    request = ChatRequest("m", "m", (), tools=tools, tool_choice="required", parallel_tool_calls=False)
    made = compile_grammar(request, FORMATS[fmt], in_reasoning=False, token_id=known.token_id, thinking=())
    assert made is not None
    return made


FORMATS_CHECKED = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "uuid"))


@FORMATS_CHECKED.checks("time", ValueError)
def _is_time(value: Any) -> bool:
    return _is_date_time(f"2024-05-06T{value}")


@FORMATS_CHECKED.checks("date-time", ValueError)
def _is_date_time(value: Any) -> bool:
    """RFC 3339's: lower case is allowed, and so is a leap second."""
    return datetime.fromisoformat(value.upper().replace(":60", ":59")).tzinfo is not None


def valid(value: Any, schema: Any) -> None:
    jsonschema.validate(value, schema, format_checker=FORMATS_CHECKED)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_the_grammar_lets_through_is_valid(keyword: str) -> None:
    schema = KEYWORDS[keyword]
    grammar = answering(schema)
    outputs = [walk(grammar.text, KNOWN, seed, steps=300) for seed in range(15)]
    texts = [out.text for out in outputs if out.ended]
    for text in texts:
        valid(json.loads(text), schema)
    assert len(texts) >= 4


INVALID = {
    "type": ["1.5", '"x"'], "enum": ['"a"', "18"], "const": ['{"k": []}'], "anyOf": ["6", '"y"'], "oneOf": ['"z"'],
    "allOf": ["2", "100"], "properties": ['{"a": "x"}'], "required": ['{"a": null}'], "items": ["[true]"],
    "additionalProperties": ['{"a": "x"}'], "patternProperties": ['{"y": null}', '{"x": 1}'], "minProperties": ["{}"],
    "maxProperties": ['{"a":null,"b":null,"c":null}'], "prefixItems": ["[1]", "[null,1,2]"], "minItems": ["[null]"],
    "maxItems": ["[null,null,null]"], "minLength": ['"ab"'], "maxLength": ['"abcd"'], "pattern": ['"d-12"', '"a-1"'],
    "minimum": ["-4", "121"], "exclusiveMinimum": ["0", "2"], "multipleOf": ["8"], "format date": ['"2024-13-01"'],
    "format uuid": ['"x"'], "$ref": ['"x"'],
}  # fmt: skip


@pytest.mark.parametrize("keyword", INVALID)
def test_what_a_keyword_forbids_does_not_pass(keyword: str) -> None:
    grammar = answering(KEYWORDS[keyword])
    assert [text for text in INVALID[keyword] if accepts(grammar.text, KNOWN, text)] == []


IN_NOTATIONS = [
    name for name in KEYWORDS if name not in ("patternProperties", "minProperties", "maxProperties", "prefixItems")
]


@pytest.mark.parametrize("fmt", ["qwen3_xml", "deepseek_v32", "gemma4", "pythonic"])
@pytest.mark.parametrize("keyword", IN_NOTATIONS)
def test_arguments_in_other_notations_are_valid_too(fmt: str, keyword: str) -> None:
    schema = {"type": "object", "properties": {"v": KEYWORDS[keyword]}, "required": ["v"]}
    schema["$defs"] = KEYWORDS[keyword].get("$defs", {})
    known = vocabulary_of(FORMATS[fmt], special=True)
    grammar = calling(fmt, schema, known, strict=True)
    ended = 0
    for seed in range(6):
        out = walk(grammar.text, known, seed, steps=400)
        if out.ended:
            answer = fold(events_of(fmt, [out.text], tools=(ToolSpec("f", parameters=schema),)))
            ((_, arguments),) = answer.calls
            valid(arguments, schema)
            ended += 1
    assert ended


CANNOT: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {}, "then": {"type": "null"}}, "if"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"minProperties": 2}}}, "dependentSchemas"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a).*"}, "pattern"),
    "back reference": ({"type": "string", "pattern": "(a)\\1"}, "pattern"),
    "word boundary": ({"type": "string", "pattern": "\\bfoo"}, "pattern"),
    "nested repetition": ({"type": "string", "pattern": "^(a{1,100}){1,100}$"}, "pattern"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "overlapping patterns": ({"type": "object", "patternProperties": {"^a": {}, "a$": {}}}, "patternProperties"),
    "optional minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
        "minProperties",
    ),
    "unknown format": ({"type": "string", "format": "idn-email"}, "format"),
    "remote reference": ({"$ref": "https://example.com/schema"}, "$ref"),
    "reference to nothing": ({"$ref": "#/$defs/nope"}, "$ref"),
    "reference to itself": ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "$ref"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "too many items": ({"type": "array", "maxItems": 100_000}, "maxItems"),
    "malformed": ({"type": "object", "properties": 5}, "properties"),
}


@pytest.mark.parametrize("name", CANNOT)
@pytest.mark.parametrize("strict", [True, False])
def test_a_response_format_that_cannot_be_enforced_is_refused_by_name(name: str, strict: bool) -> None:
    schema, keyword = CANNOT[name]
    with pytest.raises(BadRequest) as refused:
        answering({"type": "object", "properties": {"a": schema}, "$defs": schema.get("$defs", {})}, strict=strict)
    path = f"response_format.json_schema.schema.properties.a.{keyword}"
    assert refused.value.fields["param"] == path
    assert refused.value.message.startswith(f"{path}: ")


@pytest.mark.parametrize("name", CANNOT)
def test_a_strict_tool_that_cannot_be_enforced_is_refused_and_another_loses_the_keyword(name: str) -> None:
    schema, keyword = CANNOT[name]
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "required": ["b"]}
    parameters["$defs"] = schema.get("$defs", {})
    path = f"tools[0].function.parameters.properties.a.{keyword}"
    with pytest.raises(BadRequest) as refused:
        calling("hermes", parameters, KNOWN, strict=True)
    assert refused.value.fields["param"] == path
    grammar = calling("hermes", parameters, KNOWN)
    assert grammar.left_out == (path,)
    for arguments, wanted in (('{"b": 1}', True), ('{"b": "x"}', False), ("{}", False), ('{"b": 1, "c": 1}', False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(grammar.text, KNOWN, text) is wanted, arguments


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("a{3}", 3), ("(a{2,3}b){4,}", 12), ("[{2}]a{5}\\{9}", 5), ("(x)(y{7})z{2}", 7), ("a+b*", 1), (")(", 1)],
)
def test_repetitions_in_each_other_are_multiplied(pattern: str, count: int) -> None:
    assert repetitions(pattern) == count


def test_one_of_becomes_any_of_where_it_cannot_be_enforced() -> None:
    found = enforced({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "here", strict=False)
    assert found.schema == {"anyOf": [{"type": "integer"}, {"type": "number"}]}
    assert found.left_out == ("here.oneOf",)


SAYS_NOTHING = (
    {
        "type": "string",
        "title": "t",
        "description": "d",
        "default": "x",
        "examples": ["y"],
        "x-own": 1,
        "nullable": True,
    },
    {"type": "array", "uniqueItems": False},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"then": {"type": "null"}, "type": "string"},
    {"x-guidance": {"whitespace_flexible": True}, "type": "string"},
)


@pytest.mark.parametrize("schema", SAYS_NOTHING)
def test_annotations_are_no_constraints(schema: Any) -> None:
    assert enforced(schema, "here", strict=True).schema == {"type": schema["type"]}


def test_objects_that_list_their_properties_get_no_others() -> None:
    listed = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert accepts(answering(listed).text, KNOWN, "{}")
    assert not accepts(answering(listed).text, KNOWN, '{"b": 1}')
    assert accepts(answering({**listed, "additionalProperties": True}).text, KNOWN, '{"b": 1}')
    both = {"allOf": [listed, {"type": "object", "properties": {"b": {"type": "null"}}}]}
    assert accepts(answering(both).text, KNOWN, '{"a": null, "b": null}')


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(steps: int, keyword: str) -> Any:
    definitions: dict[str, Any] = {}
    for at in range(steps):
        further = {"$ref": f"#/$defs/d{at + 1}"}
        definitions[f"d{at}"] = {keyword: [{**further, "minLength": at}, {**further, "maxLength": 99 - at}]}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{steps}": {"type": "string"}}}


NULLS = {"type": "array", "items": {"type": "null"}}
CIRCLE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n", "minProperties": 1}}}
HOSTILE: dict[str, Any] = {
    "deep": deep(150),
    "wide": {"type": "object", "properties": {f"p{at}": {"type": "integer", "minimum": at} for at in range(2500)}},
    "many items": {"type": "array", "items": {**NULLS, "maxItems": 999}, "maxItems": 99_999},
    "many arrays": {"type": "object", "properties": {f"p{at}": {**NULLS, "maxItems": 900} for at in range(300)}},
    "doubling": doubling(40, "anyOf"),
    "doubling all": doubling(40, "allOf"),
    "long enum": {"enum": [f"value {at}" for at in range(50_000)]},
    "long pattern": {"type": "string", "pattern": "(a|b)" * 5000},
    "circle": {"$ref": "#/$defs/n", "$defs": {"n": CIRCLE}},
}


@pytest.mark.parametrize("fmt", ["hermes", "qwen3_xml", "gemma4"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_makes_a_small_grammar(name: str, fmt: str) -> None:
    schema = {"type": "object", "properties": {"a": HOSTILE[name]}, "$defs": HOSTILE[name].get("$defs", {})}
    grammar = calling(fmt, schema, KNOWN)
    assert len(grammar.text) < 200_000
    assert grammar.left_out or name == "doubling all"


def test_a_large_schema_of_no_ill_intent_is_enforced_whole() -> None:
    def field(at: int) -> Any:
        return {
            "type": "object",
            "properties": {f"n{at}": {"type": "integer", "minimum": at}, "s": {"enum": ["a", "b"]}},
        }

    schema = {"type": "object", "properties": {f"p{at}": field(at) for at in range(200)}}
    assert calling("hermes", schema, KNOWN, strict=True).left_out == ()
