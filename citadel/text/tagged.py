"""Arguments as tagged parameters: plain text between markers, typed by the tool's schema.

The text of a value may hold the very markers of the frame: a file about tool calls does. So a closing marker ends a
value only if the frame goes on behind it, with another parameter or the end of the call and what follows that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from citadel.text.coerce import Shape, quoted, surely_text
from citadel.text.formats import Tagged
from citadel.text.lexer import Ended, Source, Unreadable, Wait, leads, parts, watch
from citadel.text.values import JsonOut, composite, from_text, scan

MAX_HEAD: Final = 64
"""Characters by which a value shows whether it can be something other than a string."""

_kind: Final = re.compile(r'\s*(?:string="(?:true|false)"\s*)?').fullmatch

Paths = Sequence[Sequence[str]]


def arguments(src: Source, syntax: Tagged, shape: Shape, out: JsonOut, ends: Paths) -> Wait[None]:
    """All parameters of a call, up to one of `ends`, which is not used up."""
    follow: Paths = ((str(syntax.header[0]),), *ends)
    out.open("{", "}")
    between = ""
    while True:
        while src.peek() is None:
            yield
        src.mark()
        if (yield from leads(src, 0, ends)):
            break
        found: dict[str, str] = {}
        yield from parts(src, syntax.header, found)
        name = found["name"].strip()
        if not _kind(found.get("kind", "")):
            raise Unreadable
        out.write(f"{between}{quoted(name)}: ")
        between = ", "
        yield from _Value(src, syntax, _typed(shape.member(name), found.get("kind")), out).read(follow)
    out.end()


def _typed(shape: Shape, kind: str | None) -> Shape:
    """Where the schema doesn't know a parameter's type, what the model says of it counts."""
    if shape.types or kind is None or '"true"' in kind:
        return shape
    return _UNTYPED


_UNTYPED: Final = Shape({"type": ["null", "boolean", "number", "object", "array", "string"]}, {})


class _Value:
    """One value: sent on as it comes if it can only be a string, else kept until its type can be told."""

    def __init__(self, src: Source, syntax: Tagged, shape: Shape, out: JsonOut) -> None:
        self._src = src
        self._shape = shape
        self._out = out
        self._trim = syntax.trimmed
        self._search = watch((f"\n{syntax.close}", syntax.close) if syntax.trimmed else (syntax.close,))
        self._kept: list[str] = []
        self._head = ""
        self._streams = False

    def read(self, follow: Paths) -> Wait[None]:
        src = self._src
        # From here on the text is the value, whatever comes: there is nothing to give back.
        src.unmark()
        while True:
            buf, pos = src.buf, src.pos
            found = self._search(buf, pos)
            end = len(buf) if found is None else found.start()
            if end > pos:
                self._add(buf[pos:end])
                src.pos = end
            if found is not None and found.lastindex is not None:
                size = found.end() - end
                if (yield from leads(src, size, follow)):
                    src.pos += size
                    self._finish()
                    return
                self._add(found.group())
                src.pos += size
            elif src.closed:
                self._end_of_output()
                raise Ended
            else:
                yield

    def _add(self, text: str) -> None:
        if self._trim:
            self._trim = False
            if text[0] == "\n":
                text = text[1:]
        if self._streams:
            self._out.write(quoted(text)[1:-1])
            return
        self._kept.append(text)
        self._head += text[: MAX_HEAD - len(self._head)]
        if self._shape.takes_text and surely_text(self._head, self._shape.types):
            self._streams = True
            self._out.open('"', '"')
            self._out.write(quoted("".join(self._kept))[1:-1])

    def _finish(self) -> None:
        if self._streams:
            self._out.end()
        else:
            self._out.write(from_text("".join(self._kept), self._shape))

    def _end_of_output(self) -> None:
        """The output ended in the value. A closing marker that was begun is no part of it."""
        src = self._src
        tail = src.buf[src.pos :]
        src.pos = len(src.buf)
        if tail and len(tail.strip()) < 2:
            self._add(tail)
        raw = "".join(self._kept)
        if not self._streams and composite(raw, self._shape):
            text, rest = scan(raw, self._shape)
            self._out.write(text)
            src.replace(rest)
        else:
            self._finish()
