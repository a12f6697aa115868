"""Text turned into JSON by a tool's schema."""

from __future__ import annotations

from typing import Any

import pytest

from citadel.text.coerce import Shape, surely_text
from citadel.text.values import from_text

STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "text", "json"),
    [
        (STRING, "7", '"7"'),
        (STRING, "null", '"null"'),
        (INTEGER, "7", "7"),
        (INTEGER, " 7\n", "7"),
        (INTEGER, "-007", "-7"),
        (INTEGER, "7.0", "7"),
        (INTEGER, "7.5", '"7.5"'),
        (INTEGER, "9" * 5000, "9" * 5000),
        (INTEGER, "", '""'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, ".5", "0.5"),
        ({"type": "number"}, "inf", '"inf"'),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "boolean"}, "0", "false"),
        ({"type": "boolean"}, "yes", '"yes"'),
        (NULL, "None", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", '"None"'),
        ({"anyOf": [STRING, INTEGER]}, "7", "7"),
        ({"anyOf": [STRING, INTEGER]}, "7b", '"7b"'),
        ({"anyOf": [INTEGER, NULL]}, "null", "null"),
        ({"oneOf": [{"type": "boolean"}, INTEGER]}, "1", "1"),
        ({"enum": ["a", "b"]}, "7", '"7"'),
        ({"enum": [1, 2, None]}, "2", "2"),
        ({"const": True}, "true", "true"),
        ({"type": "array", "items": INTEGER}, '["1", 2]', "[1, 2]"),
        ({"type": "object", "properties": {"a": INTEGER}}, "{'a': '1', \"b\": True}", '{"a": 1, "b": true}'),
        ({"type": "object", "additionalProperties": INTEGER}, '{"a": "1"}', '{"a": 1}'),
        ({"type": "object"}, "{broken", '"{broken"'),
        ({"type": "object"}, '{"a": 1} and more', '"{\\"a\\": 1} and more"'),
        ({"type": "array"}, "a, b", '"a, b"'),
        ({"type": ["array", "string"]}, "[a]", '"[a]"'),
        ({}, "7", '"7"'),
        (True, "7", '"7"'),
        (None, "{}", '"{}"'),
        ({"$ref": "#/$defs/n"}, "7", "7"),
        ({"$ref": "#/$defs/loop"}, "7", '"7"'),
        ({"$ref": "elsewhere"}, "7", '"7"'),
        ({"$ref": "#/$defs/none/deeper"}, "7", '"7"'),
        ({"allOf": [{"$ref": "#/$defs/n"}, {"minimum": 3}]}, "7", "7"),
    ],
)
def test_text_becomes_what_the_schema_asks_for(schema: Any, text: str, json: str) -> None:
    root = {"$defs": {"n": INTEGER, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    assert from_text(text, Shape(schema, root)) == json


def test_a_schema_that_refers_to_itself_is_followed_as_deep_as_the_value() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}, "n": INTEGER}}
    assert from_text('{"n": "1", "next": {"next": {"n": "2"}}}', Shape(node, node)) == (
        '{"n": 1, "next": {"next": {"n": 2}}}'
    )


@pytest.mark.parametrize(
    ("head", "types", "sure"),
    [
        ("any", {"string"}, True),
        ("", {"string", "null"}, False),
        ("nu", {"string", "null"}, False),
        ("null", {"string", "null"}, False),
        ("nub", {"string", "null"}, True),
        ("t", {"string", "boolean"}, False),
        ("12", {"string", "integer"}, False),
        ("12 a", {"string", "integer"}, True),
        ("12", {"string", "null"}, True),
        (" {", {"string", "object"}, False),
        ("{", {"string", "integer"}, True),
    ],
)
def test_a_text_is_sent_as_soon_as_it_can_be_nothing_else(head: str, types: set[str], sure: bool) -> None:
    assert surely_text(head, frozenset(types)) is sure
