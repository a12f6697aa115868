"""Schemas with their references and combinations worked out: what notations that are not JSON are written from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

from citadel.text.grammar_schema import Schema

Refuse = Callable[[str], None]
"""Told of a keyword that can't be written; it is left out then, or that ends the request."""

MAX_OPTIONS: Final = 64
_MAX_STEPS: Final = 256

_MERGED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    **dict.fromkeys(("items", "additionalProperties", "additionalItems"), lambda one, other: {"allOf": [one, other]}),
    "type": lambda one, other: _common(_names(one), _names(other)),
    "enum": lambda one, other: [value for value in one if value in other],
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "properties": lambda one, other: {
        name: {"allOf": [each[name] for each in (one, other) if name in each]} for name in {**one, **other}
    },
}


class Options:
    """Finds the ways to be valid under a schema: schemas of one type each, without `$ref` and `anyOf`."""

    def __init__(self, definitions: Mapping[str, Schema], refuse: Refuse) -> None:
        self._definitions = definitions
        self._refuse = refuse

    def of(self, schema: Schema) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        todo = [schema]
        for _ in range(_MAX_STEPS):
            if not todo or len(found) > MAX_OPTIONS:
                break
            one = todo.pop(0)
            if one is True:
                found.append({})
            elif one is not False:
                todo = [*self._apart(one, found), *todo]
        if todo:
            self._refuse("anyOf")
        return found

    def objects(self, schema: Schema) -> list[dict[str, Any]]:
        return [each for each in self.of(schema) if each.get("type", "object") == "object"]

    def _apart(self, schema: dict[str, Any], found: list[dict[str, Any]]) -> list[Schema]:
        """One step towards the options: what is still to be looked at. A schema that is one goes into `found`."""
        key = next((key for key in ("$ref", "allOf", "anyOf", "oneOf") if key in schema), None)
        rest = {name: value for name, value in schema.items() if name != key}
        if key == "$ref":
            return [self._meet(self._definitions.get(schema[key].rpartition("/")[2], True), rest)]
        if key == "allOf":
            return [reduce(self._meet, schema[key], rest)]
        if key is not None:
            return [self._meet(rest, option) for option in schema[key]]
        if isinstance(schema.get("type"), list):
            return [schema | {"type": name} for name in schema["type"]]
        found.append(schema)
        return []

    def _meet(self, one: Schema, other: Schema) -> Schema:
        """What is valid under both."""
        if one is True or other is True or one is False or other is False:
            return False if one is False or other is False else (other if one is True else one)
        out = dict(one)
        for key, value in other.items():
            if key not in out or out[key] == value:
                out[key] = value
            elif key in _MERGED:
                out[key] = _MERGED[key](out[key], value)
            else:
                self._refuse("$ref" if key == "$ref" else "allOf")
        return out if out.get("type") != [] else False


def members(schema: Mapping[str, Any]) -> dict[str, Schema]:
    """The properties that an object lists, those that it only requires included."""
    return {**dict.fromkeys(schema.get("required", ()), True), **schema.get("properties", {})}


def chosen(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values, where the schema lists them."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _names(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else types


def _common(one: list[str], other: list[str]) -> list[str]:
    common = [name for name in one if name in other]
    whole = "integer" in (*one, *other) and "number" in (*one, *other)
    return [*common, "integer"] if whole and not {"integer", "number"} & {*common} else common
