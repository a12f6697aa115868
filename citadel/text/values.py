"""Literals of a model's own notation, read as they arrive and written as JSON.

One reader serves JSON, Python's keyword arguments and Gemma's notation: they differ in quotes, keys and the sign
between key and value (`Dialect`). What is written is valid JSON up to its open brackets at every moment: a member
is written when its value has begun, a number when it is over. `JsonOut.close` adds the closers that are missing.

Small slips are read as what they can only mean: trailing commas, single quotes, raw line breaks in a string,
`True` and `None`, a backslash before a character that needs none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from citadel.text.coerce import Shape, number, quoted, scalar
from citadel.text.lexer import Ended, Source, Unreadable, Wait, literal, watch

MAX_DEPTH: Final = 100
MAX_SCALAR: Final = 1000
MAX_PLAIN: Final = 32

_LITERALS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
_TEXT: Final = frozenset({"string"})
_ESCAPES: Final = {char: "\\" + char for char in '"\\/bfnrt'} | {"'": "'"}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_SCALAR_STARTS: Final = frozenset("-0123456789tfn")
_scalar_end: Final = re.compile(r"[\s,\[\]{}():=\"'<]").search
_plain_scalar: Final = re.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?=[\s,\]})])").match
_RUNS: Final = {
    '"': re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt])*+').match,
    "'": re.compile(r"[^'\"\\\x00-\x1f]*").match,
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How literals are written.

    `quote` is the marker around strings, and such strings have no escapes; empty means quotes as in JSON and Python.
    `assign` stands between key and value, `close` ends the outermost object.
    """

    quote: str = ""
    bare_keys: bool = False
    assign: str = ":"
    close: str = "}"

    @property
    def nested(self) -> Dialect:
        """How the values themselves are written: those of keyword arguments are like JSON."""
        return self if self.assign == ":" else JSON


JSON: Final = Dialect()


class JsonOut:
    """JSON in the making: its pieces, and the closers that it lacks."""

    __slots__ = ("_closers", "_started", "pieces", "write")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.write: Callable[[str], None] = self.pieces.append
        self._closers: list[str] = []
        self._started = False

    def open(self, text: str, closer: str) -> None:
        if len(self._closers) >= MAX_DEPTH:
            raise Unreadable
        self._started = True
        self.write(text)
        self._closers.append(closer)

    def end(self) -> None:
        self.write(self._closers.pop())

    def whole(self, text: str) -> None:
        """A value that is complete."""
        self._started = True
        self.write(text)

    def close(self) -> None:
        """Make it complete; with nothing written, an empty object. What is written next is another value."""
        while self._closers:
            self.end()
        if not self._started:
            self.write("{}")
        self._started = False

    def take(self) -> str:
        text = "".join(self.pieces)
        self.pieces.clear()
        return text


class Values:
    """Reads literals of one dialect from `src` and writes them to `out`."""

    __slots__ = ("_dialect", "_lead", "_out", "_src")

    def __init__(self, src: Source, dialect: Dialect, out: JsonOut) -> None:
        self._src = src
        self._dialect = dialect
        self._out = out
        self._lead = ""

    def value(self, shape: Shape) -> Wait[None]:
        src = self._src
        while (ch := src.peek()) is None:
            yield
        if ch in _SCALAR_STARTS and shape.types != _TEXT:
            # Nearly always it is a plain number or word: the rest of this is for those that are not.
            while (found := _plain_scalar(src.buf, src.pos)) is None:
                if src.closed or len(src.buf) - src.pos > MAX_PLAIN or _scalar_end(src.buf, src.pos):
                    break
                yield
            else:
                self._out.write(self._lead + found.group())
                src.pos = found.end()
                src.mark()
                return
        if ch == "{":
            src.pos += 1
            yield from self.members(shape, self._dialect)
        elif ch == "[":
            yield from self._items(shape)
        elif ch in _RUNS or (self._dialect.quote and ch == self._dialect.quote[0]):
            yield from self._string(shape)
        else:
            yield from self._scalar(shape)

    def members(self, shape: Shape, dialect: Dialect) -> Wait[None]:
        """The rest of an object whose opening bracket is used up."""
        src = self._src
        self._out.open(self._lead + "{", "}")
        src.mark()  # the key before it and the bracket are said now
        between = ""
        while (yield from self._another(dialect.close, first=not between)):
            key = yield from self._key(dialect)
            while src.peek() is None:
                yield
            yield from literal(src, dialect.assign)
            self._lead = f"{between}{quoted(key)}: "
            between = ", "
            yield from self.value(shape.member(key))
        src.pos += 1
        self._out.end()
        src.mark()

    def _items(self, shape: Shape) -> Wait[None]:
        src = self._src
        src.pos += 1
        self._out.open(self._lead + "[", "]")
        src.mark()
        self._lead = ""
        while (yield from self._another("]", first=not self._lead)):
            yield from self.value(shape.items)
            self._lead = ", "
        src.pos += 1
        self._out.end()
        src.mark()

    def _another(self, close: str, *, first: bool) -> Wait[bool]:
        """Whether another member follows; the comma before it is used up, and so is one before the closing bracket."""
        src = self._src
        while (ch := src.peek()) is None:
            yield
        src.mark()
        if ch == close:
            return False
        if first:
            return True
        if ch != ",":
            raise Unreadable
        src.pos += 1
        src.mark()
        while (ch := src.peek()) is None:
            yield
        src.mark()
        return ch != close

    def _key(self, dialect: Dialect) -> Wait[str]:
        src = self._src
        ch = src.buf[src.pos]
        if dialect.quote and ch == dialect.quote[0]:
            yield from literal(src, dialect.quote)
            pieces: list[str] = []
            yield from self._marked_string(pieces.append)
            return json.loads(f'"{"".join(pieces)}"')
        if ch in _RUNS and not dialect.quote:
            return (yield from self.text())
        if not dialect.bare_keys:
            raise Unreadable
        key = yield from self._word()
        if not key:
            raise Unreadable
        return key

    def text(self) -> Wait[str]:
        """A string at the current character, as the text that it stands for."""
        pieces: list[str] = []
        yield from self._plain_string(pieces.append)
        return json.loads(f'"{"".join(pieces)}"')

    def _string(self, shape: Shape) -> Wait[None]:
        src, out = self._src, self._out
        quote = self._dialect.quote
        if quote:
            yield from literal(src, quote)
        read = self._marked_string if quote else self._plain_string
        if shape.takes_text:
            out.open(self._lead + '"', '"')
            src.unmark()
            yield from read(out.write)
            out.end()
        else:
            pieces: list[str] = []
            yield from read(pieces.append)
            out.write(self._lead + from_text(json.loads(f'"{"".join(pieces)}"'), shape))
        src.mark()

    def _plain_string(self, write: Callable[[str], None]) -> Wait[None]:
        """The inside of a string in quotes, written as JSON would, up to and with the closing quote."""
        src = self._src
        quote = src.buf[src.pos]
        src.pos += 1
        run = _RUNS[quote]
        while True:
            plain = run(src.buf, src.pos)
            if plain is not None and plain.end() > src.pos:
                write(plain.group())
                src.pos = plain.end()
            if src.pos == len(src.buf):
                if src.closed:
                    raise Ended
                yield
                continue
            ch = src.buf[src.pos]
            if ch == quote:
                src.pos += 1
                return
            if ch == "\\":
                write((yield from _escape(src)))
            else:
                src.pos += 1
                write(quoted(ch)[1:-1])

    def _marked_string(self, write: Callable[[str], None]) -> Wait[None]:
        """The inside of a string between markers, up to and with the closing one."""
        src = self._src
        quote = self._dialect.quote
        search = watch((quote,))
        while True:
            found = search(src.buf, src.pos)
            end = len(src.buf) if found is None else found.start()
            if end > src.pos:
                write(quoted(src.buf[src.pos : end])[1:-1])
                src.pos = end
            if found is not None and (found.lastindex is not None or src.closed):
                # The end of the output inside the closing marker is the marker.
                src.pos = found.end()
                return
            if src.closed:
                raise Ended
            yield

    def _scalar(self, shape: Shape) -> Wait[None]:
        src = self._src
        word = yield from self._word()
        text = _LITERALS.get(word) or (number(word) if word[:1] in "+-.0123456789" else None)
        if text is None and self._dialect.quote:
            # Gemma leaves out the marks around simple words now and then.
            text = from_text(word, shape)
        elif text is not None and text != "null" and shape.types == _TEXT:
            text = quoted(word)
        if not word or text is None:
            raise Unreadable
        self._out.write(self._lead + text)
        src.mark()
        if src.closed and src.pos == len(src.buf):
            raise Ended

    def _word(self) -> Wait[str]:
        """Up to a character that cannot be part of a number or name, or the end of the output."""
        src = self._src
        seen = 0
        while True:
            end = _scalar_end(src.buf, src.pos + seen)
            seen = (len(src.buf) if end is None else end.start()) - src.pos
            if seen > MAX_SCALAR:
                raise Unreadable
            if end is not None or src.closed:
                word = src.buf[src.pos : src.pos + seen]
                src.pos += seen
                return word
            yield


def _escape(src: Source) -> Wait[str]:
    """What a backslash and the characters after it stand for, as JSON writes it. Without meaning, it's a backslash."""
    while len(src.buf) - src.pos < 2 and not src.closed:
        yield
    ch = src.buf[src.pos + 1 : src.pos + 2]
    if (known := _ESCAPES.get(ch)) is not None:
        src.pos += 2
        return known
    code = (yield from _code(src, src.pos)) if ch in _HEX_DIGITS else None
    if code is None:
        src.pos += 1
        return "\\\\"
    src.pos += 2 + _HEX_DIGITS[ch]
    if 0xD800 <= code < 0xDC00 and ch == "u":
        low = yield from _code(src, src.pos)
        if low is not None and 0xDC00 <= low < 0xE000:
            src.pos += 6
            return quoted(chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00))[1:-1]
    # Half a pair is no character: many a JSON reader refuses the whole text because of it.
    return "\ufffd" if 0xD800 <= code < 0xE000 else quoted(chr(code))[1:-1]


def _code(src: Source, at: int) -> Wait[int | None]:
    """The number in the `\\u0041` that begins at `at`; None if it is none."""
    at -= src.pos
    while True:
        have = src.buf[src.pos + at : src.pos + at + 10]
        digits = _HEX_DIGITS.get(have[1:2], 0)
        if have and (have[0] != "\\" or (len(have) > 1 and not digits)):
            return None
        hexes = _HEX.match(have, 2)
        known = 0 if hexes is None else min(hexes.end() - 2, digits)
        if digits and known == digits:
            code = int(have[2 : 2 + digits], 16)
            return code if code <= 0x10FFFF else None
        if src.closed or (digits and len(have) > 2 + known):
            return None
        yield


def scan(text: str, shape: Shape) -> tuple[str, str]:
    """A literal at the start of a whole `text`, as JSON, and the text behind what could be read of it."""
    src = Source(text, closed=True)
    out = JsonOut()
    src.mark()
    try:
        for _ in Values(src, JSON, out).value(shape):
            pass
    except Unreadable:
        src.rewind()
    out.close()
    return out.take(), src.buf[src.pos :]


def from_text(raw: str, shape: Shape) -> str:
    """`raw` as JSON of the type that the schema asks for; as a string where it is not of that type."""
    done = scalar(raw, shape.types)
    if done is None and composite(raw, shape):
        text, rest = scan(raw, shape)
        done = text if not rest.strip() else None
    return quoted(raw) if done is None else done


def composite(raw: str, shape: Shape) -> bool:
    """Whether `raw` begins like an object or array, and the schema wants such a thing."""
    kind = {"{": "object", "[": "array"}.get(raw.lstrip()[:1])
    return kind in shape.types
