"""What a tool's schema says of a value, and text turned into JSON by it.

Only what decides the JSON type is looked at: `type`, `enum`, `const`, the alternatives and local `$ref`s. Whether a
value is allowed is the client's business; a value that doesn't fit stays as the model wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, Final, cast

MAX_SCHEMA_STEPS: Final = 64
"""Sub-schemas looked at for one value; a schema that refers to itself would never be done."""

_TYPE_OF: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_INTEGER: Final = re.compile(r"([+-]?)0*(\d+)(?:\.0*)?")
_JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMERIC: Final = re.compile(r"[-+.0-9eE_]*\s*")
_NUMBERS: Final = frozenset({"integer", "number"})
_COMPOSITES: Final = frozenset({"object", "array"})


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return encode_basestring(text)


class Shape:
    """What a schema says of one value's type. `types` is empty where it says nothing."""

    def __init__(self, schema: Any, root: Mapping[str, Any]) -> None:
        self._root = root
        self._members: dict[str, Shape] = {}
        self._schema = schema

    @cached_property
    def _schemas(self) -> list[Mapping[str, Any]]:
        return _alternatives(self._schema, self._root)

    @cached_property
    def types(self) -> frozenset[str]:
        return frozenset(name for schema in self._schemas for name in _types(schema))

    @property
    def takes_text(self) -> bool:
        """Whether a string is as good as anything: it is allowed, or nothing is known."""
        return not self.types or "string" in self.types

    def member(self, key: str) -> Shape:
        known = self._members.get(key)
        if known is None:
            known = self._members[key] = Shape(self._find(key), self._root)
        return known

    @cached_property
    def items(self) -> Shape:
        return Shape(next((s["items"] for s in self._schemas if "items" in s), None), self._root)

    def _find(self, key: str) -> Any:
        for schema in self._schemas:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return cast("Mapping[str, Any]", properties)[key]
        return next((s["additionalProperties"] for s in self._schemas if "additionalProperties" in s), None)


def _alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema with its `$ref`s followed and its combinations laid side by side."""
    found: list[Mapping[str, Any]] = []
    todo: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_STEPS):
        if not todo:
            break
        step = todo.pop(0)
        if isinstance(step, Mapping):
            one = cast("Mapping[str, Any]", step)
            found.append(one)
            if isinstance(ref := one.get("$ref"), str):
                todo.append(_resolve(ref, root))
            for word in ("anyOf", "oneOf", "allOf"):
                if isinstance(several := one.get(word), list):
                    todo.extend(cast("list[Any]", several)[:MAX_SCHEMA_STEPS])
    return found


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    place: Any = root
    if not ref.startswith("#"):
        return None
    for step in ref[1:].split("/")[1:]:
        if not isinstance(place, Mapping):
            return None
        place = cast("Mapping[str, Any]", place).get(step.replace("~1", "/").replace("~0", "~"))
    return place


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    said = schema.get("type")
    if isinstance(said, str):
        return (said,)
    if isinstance(said, list):
        return [name for name in cast("list[Any]", said) if isinstance(name, str)]
    if "const" in schema:
        return (_type_of(schema["const"]),)
    values = schema.get("enum")
    if isinstance(values, list):
        return [_type_of(value) for value in cast("list[object]", values)]
    return ()


def _type_of(value: object) -> str:
    return _TYPE_OF.get(type(value), "string")


ANYTHING: Final = Shape(None, {})


def scalar(text: str, types: frozenset[str]) -> str | None:
    """`text` as a null, number or boolean of `types`, in JSON; None if it's none of them.

    Where a string is allowed too, only the exact spellings of JSON count.
    """
    word = text.strip()
    if not word:
        return None
    strict = "string" in types
    if not strict:
        word = word.lower()
    if "null" in types and (word == "null" or (word == "none" and not strict)):
        return "null"
    if "boolean" in types:
        if word in ("true", "false"):
            return word
        if word in ("0", "1") and not strict and not types & _NUMBERS:
            return "true" if word == "1" else "false"
    return number(word, whole="number" not in types) if types & _NUMBERS else None


def number(word: str, *, whole: bool = False) -> str | None:
    """A number in JSON, also from what only Python would call one; None if it is none. `whole` asks for an integer."""
    if (found := _INTEGER.fullmatch(word)) is not None and (whole or "." not in word):
        sign = "-" if found[1] == "-" else ""
        return sign + found[2]
    if whole:
        return None
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if isfinite(value) else None


def surely_text(head: str, types: frozenset[str]) -> bool:
    """Whether a value that begins with `head` can only be a string, so that it need not be waited for."""
    others = types - {"string"}
    if not others:
        return True
    head = head.lstrip()
    if not head:
        return False
    if head[0] in "{[":
        return not others & _COMPOSITES
    if head[0] in "+-.0123456789":
        return not others & _NUMBERS or _NUMERIC.fullmatch(head) is None
    literals = ["null"] if "null" in others else []
    if "boolean" in others:
        literals += ["true", "false"]
    return not any(word.startswith(head.rstrip()) for word in literals)
