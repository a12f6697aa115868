"""Arguments as literals of a dialect that is not JSON: Gemma's, with its own quotes and bare keys, and Python's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from citadel.text.coerce import quoted as json_string
from citadel.text.grammar_lark import ANY_NAME, COMMA, Lark, either, none_of, quoted, seq, without
from citadel.text.grammar_merge import Options, Refuse, chosen, members
from citadel.text.grammar_schema import Enforced, Schema
from citadel.text.grammar_strings import conditions, may_be_empty
from citadel.text.values import Dialect

_NOT_WRITTEN: Final = ("patternProperties", "minProperties", "maxProperties", "prefixItems", "additionalItems")
_NUMERIC: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTUAL: Final = ("pattern", "format", "minLength", "maxLength")
_ALL_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")
_BARE_KEY: Final = re.compile(r"[^\s,\[\]{}():=\"'<]{1,200}")
_NO_QUOTE: Final = r"/[^'\\\x00-\x1f]*/"
_SINGLE: Final = r"/'([^'\\\x00-\x1f]|\\['\\nt])*'/"
_PYTHON: Final = {"true": "True", "false": "False", "null": "None"}


class DialectArguments:
    """Writes the rules for the arguments of one call."""

    def __init__(self, lark: Lark, arguments: Enforced, dialect: Dialect, refuse: Refuse) -> None:
        self._lark = lark
        self._dialect = dialect
        self._refuse = refuse
        self._options = Options(arguments.definitions, refuse)
        self._known: dict[str, str] = {}
        self._words = _PYTHON if dialect.assign == "=" else {}

    def of(self, schema: Schema) -> str:
        """The members of the outermost object, and its closing bracket."""
        objects = self._options.objects(schema)
        return seq(either(self._members(each, self._dialect) for each in objects), quoted(self._dialect.close))

    def _value(self, schema: Schema) -> str:
        key = json.dumps(schema)
        if key not in self._known:
            self._known[key] = name = self._lark.reserve()
            self._lark.define(name, either(each for option in self._options.of(schema) for each in self._ways(option)))
        return self._known[key]

    def _ways(self, option: Mapping[str, Any]) -> list[str]:
        for key in _NOT_WRITTEN:
            if key in option:
                self._refuse(key)
        if (values := chosen(option)) is not None:
            return [self._literal(value) for value in values]
        return [self._of_type(kind, option) for kind in ([option["type"]] if "type" in option else _ALL_TYPES)]

    def _of_type(self, kind: str, option: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._string(option)
        if kind == "array":
            return seq(quoted("["), self._items(option), quoted("]"))
        if kind == "object":
            return seq(quoted("{"), self._members(option, self._dialect.nested), quoted("}"))
        if kind in ("boolean", "null"):
            return either(map(self._literal, (True, False) if kind == "boolean" else (None,)))
        return self._lark.json({**{key: option[key] for key in _NUMERIC if key in option}, "type": kind}, {})

    def _string(self, option: Mapping[str, Any]) -> str:
        quote = self._dialect.quote
        if not quote:
            given = {key: option[key] for key in _TEXTUAL if key in option}
            plain = f'"\'" ({_NO_QUOTE}{conditions(option, self._refuse)}) "\'"' if given else _SINGLE
            return either([self._lark.json({**given, "type": "string"}, {}), self._lark.terminal(plain)])
        condition = without([quote]) + conditions(option, self._refuse)
        return seq(self._lark.literal(quote), self._lark.until(quote, condition, empty=may_be_empty(option)))

    def _items(self, option: Mapping[str, Any]) -> str:
        schema, least, most = option.get("items", True), option.get("minItems", 0), option.get("maxItems")
        if schema is False or most == 0:
            return ""
        item = self._value(True if isinstance(schema, list) else schema)
        further = f"({COMMA} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f"({item} {further})" + ("" if least else "?")

    def _members(self, schema: Mapping[str, Any], dialect: Dialect) -> str:
        required, known = schema.get("required", ()), members(schema)
        written: list[tuple[str, bool]] = []
        for name, value in known.items():
            key = self._key(name, dialect)
            if key is not None and value is not False:
                written.append((seq(key, _assigned(dialect), self._value(value)), name in required))
            elif name in required:
                self._refuse("required")
        extra = schema.get("additionalProperties", True)
        further = "" if extra is False else seq(self._new_key(known, dialect), _assigned(dialect), self._value(extra))
        return self._chain(written, further)

    def _chain(self, written: Sequence[tuple[str, bool]], further: str) -> str:
        """Members in their order, each but the first after a comma, those that are not required perhaps missing."""
        rest = f"({COMMA} {further})*" if further else ""
        first = f"({further} {rest})?" if further else '""'
        for member, required in reversed(written):
            one = self._lark.rule(member)
            begins = seq(one, rest)
            first = self._lark.rule(begins if required else f"{begins} | {first}")
            rest = self._lark.rule(seq(f"({COMMA} {one})" + ("" if required else "?"), rest))
        return first

    def _key(self, name: str, dialect: Dialect) -> str | None:
        """A member's name; None for one that can't be written."""
        if not dialect.bare_keys:
            return either(map(quoted, _python_strings(name)))
        if _BARE_KEY.fullmatch(name):
            return quoted(name)
        quote = dialect.quote
        return self._lark.literal(quote + name + quote) if quote and quote not in name else None

    def _new_key(self, known: Iterable[str], dialect: Dialect) -> str:
        name = self._lark.terminal(ANY_NAME + none_of(known))
        return name if dialect.bare_keys else either(seq(quoted(mark), name, quoted(mark)) for mark in "\"'")

    def _literal(self, value: Any) -> str:
        if isinstance(value, str) and not self._dialect.quote:
            return either(map(quoted, _python_strings(value)))
        return self._lark.literal(self._text(value))

    def _text(self, value: Any) -> str:
        quote = self._dialect.quote
        if isinstance(value, str):
            return f"{quote}{value}{quote}" if quote else json_string(value)
        if isinstance(value, list):
            return f"[{','.join(map(self._text, cast('list[Any]', value)))}]"
        if isinstance(value, dict):
            return self._object(cast("dict[str, Any]", value))
        text = json.dumps(value)
        return self._words.get(text, text)

    def _object(self, value: Mapping[str, Any]) -> str:
        bare = self._dialect.nested.bare_keys
        pairs = (f"{key if bare else json_string(key)}:{self._text(each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"


def _assigned(dialect: Dialect) -> str:
    return "/: ?/" if dialect.assign == ":" else quoted(dialect.assign)


def _python_strings(text: str) -> list[str]:
    """A string in either of Python's quotes, where that needs no escapes."""
    double = json_string(text)
    return [double, f"'{text}'"] if double == f'"{text}"' and "'" not in text else [double]
