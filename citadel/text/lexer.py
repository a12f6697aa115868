"""Reading text that is still arriving.

`Source` holds what has come and not been used. The readers below and in the modules above this one are generators:
where the text does not decide a question they `yield`, and go on when more has come. They never read the same text
twice, but for what `rewind` gives back, so the cost is linear in the text however it is cut.

A reader that finds the text to be something else raises `Unreadable`; one that finds the output over raises `Ended`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A reader: yields where it needs more text, returns what it has read."""

MAX_NAME: Final = 256
"""Characters of a name in a frame. Longer is prose, and must not be held back."""
MAX_GAP: Final = 256
"""Characters of whitespace between two markers that are read together."""

_visible: Final = re.compile(r"\S").search


class Unreadable(Exception):
    """The text is not what it began as."""


class Ended(Unreadable):
    """The output is over, in the midst of something."""


class Source:
    """Text that arrives in pieces, with one mark that can be returned to.

    Readers look at `buf` from `pos` on, and move `pos`. Neither survives a `yield`: `push` drops what was used.
    """

    __slots__ = ("_base", "_marked", "_saved", "_start", "buf", "closed", "cut", "pinned", "pos")

    def __init__(self, text: str = "", *, closed: bool = False) -> None:
        self.buf = text
        self.pos = 0
        self.closed = closed
        self.cut = False
        self.pinned = False
        """The mark stays where it is, whatever readers do: all that is read may have to be given back."""
        self._base = 0
        self._marked = False
        self._start = 0
        self._saved: list[str] = []

    @property
    def offset(self) -> int:
        """How many characters of the whole output lie before `pos`."""
        return self._base + self.pos

    def push(self, text: str) -> None:
        pos = self.pos
        if self._marked:
            self._saved.append(self.buf[self._start : pos])
            self._start = 0
        self.buf = self.buf[pos:] + text if pos < len(self.buf) else text
        self._base += pos
        self.pos = 0

    def close(self, *, cut: bool) -> None:
        self.closed = True
        self.cut = cut

    def mark(self) -> None:
        """What lies before here is settled; what is used from here on can be given back."""
        if not self.pinned:
            self._saved.clear()
            self._start = self.pos
            self._marked = True

    def unmark(self) -> None:
        if not self.pinned:
            self._saved.clear()
            self._marked = False

    def rewind(self) -> None:
        """Back to the mark, if there is one, which is gone then."""
        self.pinned = False
        if self._marked:
            held = "".join(self._saved)
            self._base += self._start - len(held)
            self.buf = held + self.buf[self._start :]
            self.pos = 0
            self.unmark()

    def replace(self, text: str) -> None:
        """Put `text`, the end of what was used, in the place of what is left."""
        self._base += len(self.buf) - len(text)
        self.buf = text
        self.pos = 0

    def peek(self) -> str | None:
        """The next character that is no whitespace, which is skipped; None while there is none."""
        if self.pos < len(self.buf):
            ch = self.buf[self.pos]
            if not ch.isspace():
                return ch
            found = _visible(self.buf, self.pos)
            if found is not None:
                self.pos = found.start()
                return found.group()
            self.pos = len(self.buf)
        if self.closed:
            raise Ended
        return None


@dataclass(frozen=True, slots=True)
class Slot:
    """Text on one line, up to the first character of `stop`."""

    key: str
    stop: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Parts that may be missing; present if the first of them, a marker, is."""

    parts: tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Whitespace, or none."""


Part = str | Slot | Maybe | Space
"""An element of a frame; a str is a marker."""


def literal(src: Source, text: str) -> Wait[None]:
    """Use up the marker `text`. One that the end of the output cuts short counts as written."""
    while True:
        have = src.buf[src.pos : src.pos + len(text)]
        if have == text or (src.closed and have and text.startswith(have)):
            src.pos += len(have)
            return
        if not text.startswith(have):
            raise Unreadable
        if src.closed:
            raise Ended
        yield


def parts(src: Source, wanted: Sequence[Part], found: dict[str, str]) -> Wait[None]:
    """Use up a sequence of parts; the texts of slots go into `found`."""
    for part in wanted:
        if isinstance(part, str):
            yield from literal(src, part)
        elif isinstance(part, Slot):
            found[part.key] = yield from _slot(src, part.stop)
        elif isinstance(part, Maybe):
            marker = part.parts[0]
            if isinstance(marker, str) and (yield from leads(src, 0, ((marker,),))):
                yield from parts(src, part.parts, found)
        else:
            while src.peek() is None:
                yield


def _slot(src: Source, stop: str) -> Wait[str]:
    ends = _one_of(stop)
    seen = 0
    while True:
        end = ends(src.buf, src.pos + seen)
        seen = (len(src.buf) if end is None else end.start()) - src.pos
        if seen > MAX_NAME:
            raise Unreadable
        if end is not None:
            if end.group() not in stop:
                raise Unreadable
            text = src.buf[src.pos : src.pos + seen]
            src.pos += seen
            return text
        if src.closed:
            raise Ended
        yield


def leads(src: Source, at: int, paths: Sequence[Sequence[str]]) -> Wait[bool]:
    """Whether the text `at` characters ahead reads like one of `paths`: markers with whitespace before each.

    Nothing is used up. Where the output ends first, it does.
    """
    for path in paths:
        if (yield from _leads(src, at, path)):
            return True
    return False


def _leads(src: Source, at: int, path: Sequence[str]) -> Wait[bool]:
    for text in path:
        begin = at
        while True:
            found = _visible(src.buf, src.pos + at)
            at = (len(src.buf) if found is None else found.start()) - src.pos
            if at - begin > MAX_GAP:
                return False
            if found is not None:
                break
            if src.closed:
                return True
            yield
        while (have := src.buf[src.pos + at : src.pos + at + len(text)]) != text:
            if not text.startswith(have):
                return False
            if src.closed:
                return True
            yield
        at += len(text)
    return True


Search = Callable[[str, int], "re.Match[str] | None"]


@lru_cache(maxsize=512)
def watch(markers: tuple[str, ...]) -> Search:
    """A search for the first of `markers`. A match with `lastindex` None is one that the end of the text cuts off."""
    by_first: dict[str, list[str]] = {}
    for marker in sorted(markers, key=len, reverse=True):
        by_first.setdefault(marker[0], []).append(marker[1:])
    branches: list[str] = []
    for first, rests in by_first.items():
        whole = "|".join(re.escape(rest) for rest in rests)
        begun = "|".join(_beginnings(rest) for rest in rests)
        # The first character stands in front, alone: that lets `re` skip to it.
        branches.append(f"{re.escape(first)}(?:({whole})|(?:{begun})\\Z)")
    return re.compile("|".join(branches) or r"(?!)").search


def _beginnings(rest: str) -> str:
    """A pattern for every proper beginning of `rest`, the empty one included."""
    pattern = ""
    for char in reversed(rest[:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern


@lru_cache(maxsize=64)
def _one_of(stop: str) -> Search:
    return re.compile(f"[{re.escape(stop)}\n]").search
