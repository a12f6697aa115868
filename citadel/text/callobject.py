"""A call written as a JSON object, `{"name": ..., "arguments": {...}}`, its members in whatever order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from citadel.text.coerce import ANYTHING, Shape, quoted
from citadel.text.lexer import Ended, Source, Unreadable, Wait, literal
from citadel.text.values import JSON, JsonOut, Values, scan

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_FRAME: Final = frozenset({"id", "type", "index"})
"""Members that some models add, which say nothing of their own."""


class CallObject:
    """Reads one. `offer` announces the call and gives the shape of its arguments, or raises `Unreadable`.

    Members that do not belong there go into `rest` as text. `bare`: nothing but the object itself says that it is a
    call, so such members mean that it is none.
    """

    def __init__(
        self, src: Source, out: JsonOut, offer: Callable[[str], Shape], rest: list[str], *, bare: bool
    ) -> None:
        self._src = src
        self._out = out
        self._offer = offer
        self._rest = rest
        self._bare = bare
        self._shape: Shape | None = None
        self._early: str | None = None
        self._done = False

    def read(self) -> Wait[None]:
        """From the opening brace to the closing one."""
        src = self._src
        src.pos += 1
        while True:
            while (ch := src.peek()) is None:
                yield
            src.mark()
            if ch == "}":
                break
            if ch not in "\"'":
                raise Unreadable
            key = yield from Values(src, JSON, self._out).text()
            while src.peek() is None:
                yield
            yield from literal(src, ":")
            yield from self._member(key)
            while (ch := src.peek()) is None:
                yield
            src.mark()
            if ch == ",":
                src.pos += 1
                src.mark()
            elif ch != "}":
                raise Unreadable
        if self._shape is None:
            raise Unreadable
        src.pos += 1
        src.mark()

    def _member(self, key: str) -> Wait[None]:
        src = self._src
        while (ch := src.peek()) is None:
            yield
        if key == "name" and self._shape is None:
            yield from self._name(ch)
        elif key in _ARGUMENTS and not self._done and self._early is None:
            if self._shape is None:
                self._early = yield from self._kept()
            elif ch == "{":
                self._done = True
                src.pos += 1
                yield from Values(src, JSON, self._out).members(self._shape, JSON)
            else:
                self._write((yield from self._kept()), self._shape)
        elif self._bare and self._shape is None and key not in _FRAME:
            raise Unreadable
        else:
            text = yield from self._kept()
            if key not in _FRAME:
                self._rest.append(f"{quoted(key)}: {text}")

    def _name(self, ch: str) -> Wait[None]:
        src = self._src
        if ch not in "\"'":
            raise Unreadable
        name = yield from Values(src, JSON, self._out).text()
        try:
            while (ch := src.peek() or "") == "":
                yield
        except Ended:
            # Cut right behind the name: as certain as a name can be.
            if not src.cut:
                raise
            ch = "}"
        if ch not in ",}":
            raise Unreadable
        self._shape = self._offer(name)
        if self._early is not None:
            self._write(self._early, self._shape)

    def _kept(self) -> Wait[str]:
        """A value as JSON text, not sent on; if it can't be read, nothing of it is used up."""
        src = self._src
        pinned, src.pinned = src.pinned, True
        out = JsonOut()
        yield from Values(src, JSON, out).value(ANYTHING)
        src.pinned = pinned
        return out.take()

    def _write(self, text: str, shape: Shape) -> None:
        """Arguments that are known as a whole. Some models write the object as a string."""
        self._done = True
        if text[0] == '"':
            text = json.loads(text).strip()
        if text[:1] == "{":
            done, rest = scan(text, shape)
            self._out.whole(done)
        else:
            rest = "" if text == "null" else text
        if rest.strip():
            self._rest.append(rest)
