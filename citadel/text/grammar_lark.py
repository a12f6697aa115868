"""Writing llguidance's Lark: named rules, markers as tokens or strings, free text that holds no marker, JSON Schema.

llguidance reads text lexeme by lexeme, always the longest. So free text that a marker may follow must end by itself
before it: a marker that is a token ends any lexeme, and one that is a string is written into the lexeme of the text
(`until`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

TokenId = Callable[[str], int | None]

JSON_STYLE: Final = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""Compact, or with single spaces: nowhere can a model go on writing whitespace for ever."""

ANY_TEXT: Final = "/(?s:.*)/"
SOME_TEXT: Final = "/(?s:.+)/"

ANY_NAME: Final = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"
NEWLINE: Final = '"\\n"?'
COMMA: Final = "/, ?/"

MAYBE_TOKENS: Final = re.compile(
    r"<\|\"\|>|<[|｜][^<>|｜]+[|｜]>|｜DSML｜|<\|[^<>|]+>|<[^<>|]+\|>|</?[^<>|｜\"= ]+>|\[/?[A-Z_]+\]"
)
"""Parts of a marker that are one token in some vocabularies."""

_META: Final = frozenset(r"\.+*?()|[]{}^$/")


class NoWay(Exception):
    """Nothing can be written where something must be."""


def escaped(text: str) -> str:
    """`text` inside a regular expression of Lark."""
    return "".join(f"\\{char}" if char in _META else "\\n" if char == "\n" else char for char in text)


def quoted(text: str) -> str:
    """`text` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def without(markers: Iterable[str]) -> str:
    """A terminal's condition: none of `markers` occurs."""
    words = "|".join(escaped(marker) for marker in sorted(set(markers)))
    return f" & ~/(?s:.*)({words})(?s:.*)/" if words else ""


def none_of(texts: Iterable[str]) -> str:
    """A terminal's condition: it is none of `texts`."""
    words = "|".join(map(escaped, texts))
    return f" & ~/{words}/" if words else ""


def either(options: Iterable[str]) -> str:
    """One of the expressions, as one expression. Raises `NoWay` if there are none."""
    unique = list(dict.fromkeys(options))
    if not unique:
        raise NoWay
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


def seq(*parts: str) -> str:
    return " ".join(part for part in parts if part)


class Lark:
    """A grammar in the making; equal rules are written once."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._names: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._tokens: dict[str, int | None] = {}

    def text(self, start: str) -> str:
        rules = "".join(f"{name}: {body}\n" for name, body in self._bodies.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}"

    def rule(self, body: str) -> str:
        return self._named("r", "", body)

    def terminal(self, body: str) -> str:
        return self._named("T", "", body)

    def lazy(self, body: str) -> str:
        """A rule for text that is over as soon as it can be."""
        return self._named("z", "[lazy]", self.terminal(body))

    def reserve(self) -> str:
        """The name of a rule that is written later, by `define`: rules may refer to themselves."""
        name = f"q{len(self._names)}"
        self._names[name] = name
        return name

    def define(self, name: str, body: str) -> str:
        self._bodies[name] = body
        return name

    def json(self, schema: Any, definitions: Mapping[str, Any]) -> str:
        """A JSON value of the schema, whose `$ref`s lead to `definitions`."""
        root: dict[str, Any] = {"x-guidance": JSON_STYLE}
        if definitions and "$ref" in (text := json.dumps(schema)):
            root["$defs"] = reachable(text, definitions)
        root |= schema if isinstance(schema, dict) else {"anyOf": [schema]}
        return self.rule(f"%json {json.dumps(root, ensure_ascii=False)}")

    def token(self, text: str) -> int | None:
        """The id of `text` where it is a single token."""
        if text not in self._tokens:
            self._tokens[text] = self._token_id(text)
        return self._tokens[text]

    def literal(self, text: str) -> str:
        """`text`, in which what the model has a token for is that token."""
        return seq(*map(_written, self._parts(text)))

    def until(self, marker: str, free: str, *, empty: bool = True) -> str:
        """Free text, `free` being its condition, and the marker that ends it. `empty`: there may be no text."""
        first, *rest = self._parts(marker)
        if isinstance(first, int):
            return seq(self.free(free) + ("?" if empty else ""), *map(_written, (first, *rest)))
        body = f"({ANY_TEXT}{free}) {quoted(first)}"
        # Where a token follows, the text may hold the string many times; else its first occurrence is the end.
        return seq(self.terminal(body) if rest else self.lazy(body), *map(_written, rest))

    def closed(self, expression: str, marker: str) -> str:
        """A regular expression and the marker behind it, where `until` may stand as well: so as one lexeme too."""
        first, *rest = self._parts(marker)
        if isinstance(first, int):
            return seq(self.terminal(expression), *map(_written, (first, *rest)))
        return seq(self.terminal(f"{expression} {quoted(first)}"), *map(_written, rest))

    def free(self, condition: str) -> str:
        return self.terminal(SOME_TEXT + condition)

    def _named(self, prefix: str, options: str, body: str) -> str:
        key = f"{prefix}{options} {body}"
        if key not in self._names:
            name = f"{prefix}{len(self._names)}"
            self._names[key] = name
            self._bodies[name + options] = body
        return self._names[key]

    def _parts(self, text: str) -> list[str | int]:
        """Strings, and ids of tokens."""
        parts: list[str | int] = []
        done = 0
        for found in MAYBE_TOKENS.finditer(text):
            token = self.token(found.group())
            if token is not None:
                if found.start() > done:
                    parts.append(text[done : found.start()])
                parts.append(token)
                done = found.end()
        if done < len(text):
            parts.append(text[done:])
        return parts


def _written(part: str | int) -> str:
    return quoted(part) if isinstance(part, str) else f"<[{part}]>"


def reachable(text: str, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the definitions that a schema, as JSON text, refers to, also by way of others."""
    found: dict[str, Any] = {}
    todo = [text]
    while todo:
        for name in _REFERENCE.findall(todo.pop()):
            if name not in found and name in definitions:
                found[name] = definitions[name]
                todo.append(json.dumps(definitions[name]))
    return found


_REFERENCE: Final = re.compile(r'"\$ref": "#/\$defs/(\w+)"')
