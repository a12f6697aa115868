"""Arguments as tagged parameters, `<parameter=NAME>TEXT</parameter>` and its kin: plain text for strings, else JSON.

What can be written is what the machine reads back as the same value: a string does not hold the closing marker, and,
where its schema allows other types too, does not look like one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from citadel.text.coerce import Shape
from citadel.text.coerce import quoted as json_string
from citadel.text.formats import Tagged
from citadel.text.grammar_lark import ANY_NAME, NEWLINE, Lark, either, none_of, quoted, seq, without
from citadel.text.grammar_merge import Options, Refuse, chosen, members
from citadel.text.grammar_schema import Enforced, Schema
from citadel.text.grammar_strings import conditions, may_be_empty
from citadel.text.lexer import Part, Slot
from citadel.text.values import from_text

NOT_WRITTEN: Final = ("patternProperties", "minProperties", "maxProperties")

_MAX_NAME: Final = 200
_NO_STRING: Final = ("null", "boolean", "number", "object", "array")
_NUMERIC: Final = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_INTEGER: Final = "-?(0|[1-9][0-9]{0,30})"
_SCALARS: Final = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": f"/{_INTEGER}/",
    "number": rf"/{_INTEGER}(\.[0-9]{{1,30}})?([eE][+-]?[0-9]{{1,2}})?/",
}
_SPACE: Final = r"[\s\x1c-\x1f]*"


def writable(name: str, stop: str) -> bool:
    """Whether a frame's slot can hold the name and give it back."""
    return name == name.strip() != "" and len(name) <= _MAX_NAME and not any(char in name for char in f"{stop}\n")


def slots(parts: Sequence[Part]) -> list[Slot]:
    return [part for part in parts if isinstance(part, Slot)]


class TaggedArguments:
    """Writes the rules for the parameters of one call."""

    def __init__(self, lark: Lark, arguments: Enforced, syntax: Tagged, refuse: Refuse) -> None:
        self._lark = lark
        self._definitions = arguments.definitions
        self._root = {"$defs": arguments.definitions}
        self._syntax = syntax
        self._close = ("\n" if syntax.trimmed else "") + syntax.close
        self._slots = slots(syntax.header)
        self._refuse = refuse
        self._options = Options(arguments.definitions, refuse)

    def of(self, schema: Schema) -> str:
        return self._lark.rule(either(self._parameters(each) for each in self._options.objects(schema)))

    def _parameters(self, schema: Mapping[str, Any]) -> str:
        for key in NOT_WRITTEN:
            if key in schema:
                self._refuse(key)
        required, known = schema.get("required", ()), members(schema)
        parts: list[str] = []
        for name, value in known.items():
            if value is not False and writable(name, self._slots[0].stop):
                written = self._lark.rule(self._parameter(quoted(name), value))
                parts.append(written if name in required else f"{written}?")
            elif name in required:
                self._refuse("required")
        extra = schema.get("additionalProperties", True)
        if extra is not False:
            parts.append(f"({self._parameter(self._new_name(known), extra)})*")
        return seq(*parts) or '""'

    def _new_name(self, known: Iterable[str]) -> str:
        return self._lark.terminal(ANY_NAME + none_of(known))

    def _parameter(self, name: str, schema: Schema) -> str:
        texts, others = self._values(schema)
        if len(self._slots) == 1:
            return seq(self._header(name, ""), either([*texts, *others]), NEWLINE)
        kinds = [
            seq(self._header(name, f' string="{kind}"'), either(ways))
            for kind, ways in (("true", texts), ("false", others))
            if ways
        ]
        return seq(either(kinds), NEWLINE)

    def _header(self, name: str, kind: str) -> str:
        parts: list[str] = []
        for part in self._syntax.header:
            if isinstance(part, Slot):
                parts.append(name if part.key == "name" else quoted(kind))
            else:
                parts.append(self._lark.literal(part) if isinstance(part, str) else NEWLINE)
        return seq(*parts, quoted("\n") if self._syntax.trimmed else "")

    def _values(self, schema: Schema) -> tuple[list[str], list[str]]:
        """The ways to write a value with its closing marker: as plain text, and as JSON."""
        shape = Shape(schema, self._root)
        texts: list[str] = []
        others: list[str] = []
        for option in self._options.of(schema):
            kinds = _kinds(option, shape)
            if "string" in kinds:
                texts += self._texts(option, shape)
            others += self._others(option, sorted(kinds - {"string"}), beside_text=shape.takes_text)
        if not shape.types and len(self._slots) > 1:
            # Where the model says itself whether a value is a string, one without a schema can be anything.
            others.append(self._json({"type": list(_NO_STRING)}))
        return texts, others

    def _others(self, option: Mapping[str, Any], kinds: Sequence[str], *, beside_text: bool) -> list[str]:
        """The ways to write a value of these types."""
        if (values := chosen(option)) is not None:
            return [self._lark.literal(json.dumps(each) + self._close) for each in values if not isinstance(each, str)]
        plain = [kind for kind in kinds if beside_text and kind in _SCALARS and not option.keys() & _NUMERIC]
        ways = [self._lark.closed(_SCALARS[kind], self._close) for kind in plain]
        rest = [kind for kind in kinds if kind not in plain]
        return [*ways, self._json({**option, "type": rest})] if rest else ways

    def _json(self, schema: Schema) -> str:
        return seq(self._lark.json(schema, self._definitions), self._lark.literal(self._close))

    def _texts(self, option: Mapping[str, Any], shape: Shape) -> list[str]:
        values = chosen(option)
        if values is None:
            condition = without([self._syntax.close]) + conditions(option, self._refuse) + _no_other(shape.types)
            return [self._lark.until(self._close, condition, empty=may_be_empty(option))]
        texts = [text for text in values if isinstance(text, str) and from_text(text, shape) == json_string(text)]
        return [self._lark.literal(text + self._close) for text in texts if self._syntax.close not in text]


def _kinds(option: Mapping[str, Any], shape: Shape) -> frozenset[str]:
    if "type" in option:
        return frozenset({option["type"]})
    if (values := chosen(option)) is not None:
        return Shape({"enum": values}, {}).types
    return shape.types or frozenset({"string"})


def _no_other(types: frozenset[str]) -> str:
    """The condition that text can't be read as a value of another type."""
    words = ["null"] if "null" in types else []
    if "boolean" in types:
        words.append("true|false")
    if types & {"integer", "number"}:
        words.append(r"[-+._eE\d]+")
    brackets = ("\\{" if "object" in types else "") + ("\\[" if "array" in types else "")
    alike = f" & ~/{_SPACE}({'|'.join(words)}){_SPACE}/" if words else ""
    return alike + (f" & ~/{_SPACE}[{brackets}](?s:.*)/" if brackets else "")
