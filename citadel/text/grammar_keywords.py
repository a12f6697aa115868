"""What llguidance makes of JSON Schema's keywords, and the sizes up to which its cost stays small."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import llguidance

from citadel.text.grammar_lark import Lark

MAX_DEPTH: Final = 48
MAX_NODES: Final = 2000
"""Sub-schemas of one schema. llguidance takes about a second for as many properties of one object."""
MAX_PROPERTIES: Final = 512
MAX_ITEMS: Final = 1000
"""It writes out `maxItems` alternatives; a hundred thousand of them are more than it can number."""
MAX_ALL_ITEMS: Final = 4000
MAX_SIZE: Final = {"enum": 4096, "properties": MAX_PROPERTIES, "patternProperties": MAX_PROPERTIES, "pattern": 1000}

MAX_REPETITIONS: Final = 2000
"""With more, a few characters of output can exhaust its lexer."""

_PARTS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d{1,9}(?:,\d{0,9})?\}|.", re.DOTALL)
_COUNT: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")

NUMBER: Final = (int, float)

ENFORCED: Final[Mapping[str, type | tuple[type, ...]]] = {
    "type": (str, list),
    "enum": list,
    "const": object,
    "$ref": str,
    "allOf": list,
    "anyOf": list,
    "oneOf": list,
    "properties": dict,
    "patternProperties": dict,
    "additionalProperties": (dict, bool),
    "required": list,
    "minProperties": int,
    "maxProperties": int,
    "items": (dict, bool, list),
    "additionalItems": (dict, bool),
    "prefixItems": list,
    "minItems": int,
    "maxItems": int,
    "pattern": str,
    "format": str,
    "minLength": int,
    "maxLength": int,
    "minimum": NUMBER,
    "maximum": NUMBER,
    "exclusiveMinimum": NUMBER,
    "exclusiveMaximum": NUMBER,
    "multipleOf": NUMBER,
}
"""Keywords that llguidance enforces, and what their values are. Order matters: the last ones are given up first."""

REFUSED: Final = frozenset(
    {
        "not",
        "if",
        "uniqueItems",
        "contains",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Keywords that say something of a value, which it cannot enforce. All others are annotations."""

_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def says_nothing(key: str, value: Any) -> bool:
    """Whether a refused keyword has a value with which every instance is valid."""
    return (
        (key == "uniqueItems" and value is False)
        or (key == "propertyNames" and value in (True, {}, {"type": "string"}))
        or (key.startswith("unevaluated") and value in (True, {}))
        or (key.startswith("depend") and value == {})
    )


def well_formed(key: str, value: Any) -> bool:
    """Whether a keyword's value is what it must be, and not too large."""
    kinds = ENFORCED[key]
    if isinstance(value, bool) and kinds in (int, NUMBER):
        return False
    return _is(value, kinds) and _fits(key, value, kinds)


def _is(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds)


def _fits(key: str, value: Any, kinds: object) -> bool:
    if key == "type":
        return value in _TYPES if isinstance(value, str) else _distinct(value) and _TYPES.issuperset(value)
    if key == "required":
        return not value or (_distinct(value) and len(value) <= MAX_PROPERTIES)
    if key.endswith("Items") and kinds is int:
        return 0 <= value <= MAX_ITEMS
    if key == "pattern" and repetitions(value) > MAX_REPETITIONS:
        return False
    return key not in MAX_SIZE or len(value) <= MAX_SIZE[key]


def repetitions(pattern: str) -> int:
    """How often a part of the pattern may be repeated: counts of groups that lie in each other, multiplied."""
    groups, last = [1], 1
    for part in _PARTS.findall(pattern[: MAX_SIZE["pattern"]]):
        if part == "(":
            groups.append(1)
        elif part == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif (count := _COUNT.fullmatch(part)) is not None:
            groups[-1] = max(groups[-1], last * max(int(each) for each in count.groups() if each))
        else:
            last = 1
    return max(groups)


def _distinct(names: list[Any]) -> bool:
    return bool(names) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def objection(schema: Any, definitions: Mapping[str, Any]) -> str | None:
    """Why llguidance does not take the schema."""
    lark = Lark(lambda _: None)
    return refusal(lark.text(lark.json(schema, definitions)))


def refusal(grammar: str) -> str | None:
    """Why llguidance does not take the grammar."""
    why = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar))
    return why.splitlines()[0].partition("JSON schema: ")[2] or why.splitlines()[0] if why else None
