"""JSON Schema -> the part of it that a grammar enforces, and what was left out.

The outcome holds only keywords that llguidance enforces; its `$ref`s lead to one flat table of definitions, so that
any part of it can be used alone. An object that lists its properties gets no others unless the schema asks for them:
a model that may invent members goes on inventing them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast
from urllib.parse import unquote

from citadel.errors import BadRequest
from citadel.text.grammar_keywords import (
    ENFORCED,
    MAX_ALL_ITEMS,
    MAX_DEPTH,
    MAX_NODES,
    REFUSED,
    objection,
    says_nothing,
    well_formed,
)

Schema = Any
"""A bool, or a dict of keywords."""

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

_COMBINES: Final = ("allOf", "anyOf", "oneOf")
_LEADING: Final = (*_COMBINES, "$ref")
_SHAPING: Final = (*_LEADING, "properties", "patternProperties", "additionalProperties")
_MAPS: Final = ("properties", "patternProperties")
_INNER: Final = ("additionalProperties", "items", "additionalItems")
_GIVEN_UP: Final = tuple(reversed(list(ENFORCED)))


@dataclass(frozen=True)
class Enforced:
    """`left_out`: the paths of keywords that the grammar does not hold the model to."""

    schema: Schema
    definitions: dict[str, Schema] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()


class _TooMuch(Exception):
    pass


def enforced(schema: Mapping[str, Any], where: str, *, strict: bool) -> Enforced:
    """`where` is the schema's path in the body. Raises BadRequest for a strict one that can't be enforced whole."""
    try:
        return _enforced(json.dumps(schema), where, strict)
    except _TooMuch as why:
        if strict:
            raise BadRequest(f"{where}: {why}", where) from None
        return Enforced(ANY_OBJECT, left_out=(f"{where} ({why})",))


@lru_cache(maxsize=256)
def _enforced(text: str, where: str, strict: bool) -> Enforced:
    cleaner = _Cleaner(json.loads(text), where, strict=strict)
    found = cleaner.run()
    if objection(found.schema, found.definitions) is None:
        return found
    cleaner = _Cleaner(json.loads(text), where, strict=strict, probes=True)
    found = cleaner.run()
    if (why := objection(found.schema, found.definitions)) is not None:
        raise _TooMuch(f"it can't be enforced: {why}")
    return found


class _Cleaner:
    """One pass over a schema. With `probes`, llguidance is asked about every part, to find what it does not take."""

    def __init__(self, root: Schema, where: str, *, strict: bool, probes: bool = False) -> None:
        self._root = root
        self._where = where
        self._strict = strict
        self._probes = probes
        self._left_out: list[str] = []
        self._nodes = 0
        self._items = 0
        self._names: dict[tuple[str, bool], str] = {}
        self._definitions: dict[str, Schema] = {}
        self._todo: list[tuple[str, Schema, str, bool]] = []

    def run(self) -> Enforced:
        schema = self._clean(self._root, self._where, 0, closed=True)
        while self._todo:
            name, target, where, closed = self._todo.pop()
            self._definitions[name] = self._clean(target, where, 0, closed=closed)
        return Enforced(schema, self._definitions, tuple(dict.fromkeys(self._left_out)))

    def _clean(self, schema: Schema, where: str, depth: int, *, closed: bool) -> Schema:
        """`closed`: nothing beside this schema adds properties to its object."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _TooMuch(f"it has over {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            raise _TooMuch(f"it is nested over {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._give_up(where, "is no schema")
            return True
        given = cast("dict[str, Any]", schema)
        if "const" in given and "enum" not in given:
            # The same, and a null in it is not taken for a keyword that is not there.
            given = {**{key: value for key, value in given.items() if key != "const"}, "enum": [given["const"]]}
        kept = {key: value for key, value in given.items() if self._keep(key, value, where)}
        alone = not any(key in _LEADING for key in kept)
        inherits = closed and sum(key in _SHAPING for key in kept) == 1
        out = {
            key: self._value(key, value, f"{where}.{key}", depth + 1, closed=inherits) for key, value in kept.items()
        }
        out = {key: value for key, value in out.items() if value is not None}
        if closed and alone:
            _close(out)
        return self._probed(out, where) if self._probes else out

    def _keep(self, key: str, value: Any, where: str) -> bool:
        if key in ENFORCED:
            if well_formed(key, value):
                self._items += value if key == "maxItems" else 0
                if self._items > MAX_ALL_ITEMS:
                    raise _TooMuch(f"its arrays have over {MAX_ALL_ITEMS} items in all")
                return True
            self._give_up(f"{where}.{key}", "its value is too large, or not what it should be")
        elif key in REFUSED and not says_nothing(key, value):
            self._give_up(f"{where}.{key}", "this keyword can't be enforced")
        return False

    def _give_up(self, where: str, why: str) -> None:
        if self._strict:
            raise BadRequest(f"{where}: {why}", where)
        self._left_out.append(where)

    def _value(self, key: str, value: Any, where: str, depth: int, *, closed: bool) -> Any:
        """A keyword's value, its sub-schemas cleaned; None drops the keyword."""
        if key in _MAPS:
            return {name: self._clean(each, f"{where}.{name}", depth, closed=True) for name, each in value.items()}
        if key in _COMBINES:
            closed = closed and (key != "allOf" or len(value) == 1)
            return [self._clean(each, f"{where}[{at}]", depth, closed=closed) for at, each in enumerate(value)]
        if key == "prefixItems" or (key == "items" and isinstance(value, list)):
            return [self._clean(each, f"{where}[{at}]", depth, closed=True) for at, each in enumerate(_list(value))]
        if key in _INNER:
            return self._clean(value, where, depth, closed=True)
        if key == "$ref":
            return self._reference(value, where, closed=closed)
        return value

    def _reference(self, ref: str, where: str, *, closed: bool) -> str | None:
        known = self._names.get((ref, closed))
        if known is None:
            target = _target(ref, self._root)
            if target is None:
                self._give_up(where, "it leads to no place in this schema")
                return None
            known = self._names[ref, closed] = f"d{len(self._names)}"
            self._todo.append((known, target, f"{self._where}.{ref.removeprefix('#/').replace('/', '.')}", closed))
        return f"#/$defs/{known}"

    def _probed(self, schema: dict[str, Any], where: str) -> Schema:
        """Without what llguidance does not take."""
        for key in _GIVEN_UP:
            if self._taken(schema):
                return schema
            if key not in schema:
                continue
            less: dict[str, Any] = {name: value for name, value in schema.items() if name != key}
            if key == "oneOf":
                less |= {"anyOf": schema[key]} if "anyOf" not in schema else {}
            if self._taken(less):
                why = objection(schema, self._placeholders()) or ""
                self._give_up(f"{where}.{key}", f"this keyword can't be enforced here: {why}")
                schema = less
        return schema

    def _taken(self, schema: Schema) -> bool:
        return objection(schema, self._placeholders()) is None

    def _placeholders(self) -> dict[str, Schema]:
        """The definitions as far as they are known: those still to come are anything."""
        return dict.fromkeys(self._names.values(), True) | self._definitions


def _close(schema: dict[str, Any]) -> None:
    properties = schema.get("properties")
    if properties is None or "additionalProperties" in schema or "patternProperties" in schema:
        return
    for name in schema.get("required", ()):
        properties.setdefault(name, True)
    schema["additionalProperties"] = False


def _list(value: Any) -> list[Any]:
    return value


def _target(ref: str, root: Schema) -> Schema | None:
    """What the reference leads to in the end; one that only leads to itself leads nowhere."""
    for _ in range(MAX_DEPTH):
        found = _resolve(ref, root)
        if not isinstance(found, (bool, dict)):
            return None
        further = cast("dict[str, Any]", {} if isinstance(found, bool) else found)
        if further.keys() != {"$ref"} or not isinstance(further["$ref"], str):
            return cast("Schema", found)
        ref = further["$ref"]
    return None


def _resolve(ref: str, root: Schema) -> Any:
    """What a JSON pointer leads to; None where there is nothing."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    place: Any = root
    for step in ref.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = dict(enumerate(_list(place))).get(int(name) if name.isdecimal() else -1)
        elif isinstance(place, dict):
            place = cast("dict[str, Any]", place).get(name)
        else:
            return None
    return place


def of_object(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object whatever it says."""
    if not schema:
        return {"type": "object", "properties": {}}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}
