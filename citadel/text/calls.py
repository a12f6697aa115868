"""Blocks of calls: their frames read, calls announced, arguments sent.

A call is announced when its name is complete, was offered, and the frame goes on behind it. Up to then all is held:
`Unreadable` means that the text was no call, and it becomes text again. From then on it is a call whatever comes:
arguments that cannot be read on are closed, and what could not be read is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from citadel.messages import TextEvent, ToolCallArguments, ToolCallEnded, ToolCallStarted, ToolSpec
from citadel.text import tagged
from citadel.text.callobject import CallObject
from citadel.text.coerce import Shape
from citadel.text.formats import Frame, Tagged
from citadel.text.lexer import Ended, Source, Unreadable, Wait, leads, literal, parts
from citadel.text.values import JsonOut, Values

_NATIVE_ID: Final = re.compile(r"(?:functions\.)?(.+?)(:\d+)?")


@dataclass(slots=True)
class Block:
    """What came of a block: calls announced, markers of its frame that are still to come, text that was left over."""

    calls: int = 0
    owed: tuple[str, ...] = ()
    rest: list[str] = field(default_factory=list[str])


class Calls:
    """Reads calls from `src` into `events`. `announced` is told right before a call's first event."""

    def __init__(
        self,
        src: Source,
        tools: Sequence[ToolSpec],
        events: list[TextEvent],
        *,
        new_id: Callable[[], str],
        announced: Callable[[], None],
        complaints: list[str],
    ) -> None:
        self._src = src
        self._tools = {tool.name: tool for tool in tools}
        self._shapes: dict[str, Shape] = {}
        self._events = events
        self._new_id = new_id
        self._announced = announced
        self._complaints = complaints
        self._out = JsonOut()
        self._index = -1
        self._open = False
        self._ids: set[str] = set()

    def flush(self) -> None:
        """Send what has been read of the arguments."""
        if self._open and self._out.pieces:
            self._events.append(ToolCallArguments(self._index, self._out.take()))

    def block(self, frame: Frame, opener: str) -> Wait[Block]:
        """Read a block that begins here with `opener`. If there was no call in it, nothing was used up."""
        src = self._src
        block = Block()
        # The head of a call may stand without a block around it; then it is read as a part of the call.
        lone = bool(frame.head) and opener == frame.head[0]
        close = "" if lone else frame.close
        src.mark()
        src.pinned = True
        try:
            if not lone:
                src.pos += len(opener)
            listed = (not lone) and (yield from self._bracket(frame, needed=bool(frame.head and not opener)))
            while (yield from self._call(frame, close, block.rest, bare=not opener)):
                block.calls += 1
                src.mark()
                if lone or not (yield from self._another(frame, close, listed=listed)):
                    src.unmark()
                    return block
                src.pinned = True
            block.calls += 1
            block.owed = (*_markers(frame.tail)[-1:], *((close,) if close else ()))
        except Unreadable:
            src.rewind()
            block.owed = (close,) if block.calls and close else ()
        src.unmark()
        return block

    def message(self, name: str) -> Wait[None]:
        """A call whose frame is a message of its own, used up to the arguments."""
        shape = self._offered(name)
        self._start(name)
        yield from self._rest_of_call(Frame(), "", shape)
        self._src.unmark()

    def _bracket(self, frame: Frame, *, needed: bool) -> Wait[bool]:
        """Whether the calls stand in a list, whose bracket is used up then."""
        src = self._src
        while (ch := src.peek()) is None:
            yield
        if frame.listed and ch == "[":
            src.pos += 1
            return True
        if needed:
            raise Unreadable
        return False

    def _another(self, frame: Frame, close: str, *, listed: bool) -> Wait[bool]:
        """After a call: whether another one follows. If not, the block's end is used up."""
        src = self._src
        while (ch := src.peek()) is None:
            yield
        separator = "," if listed else frame.separator
        if separator and ch == separator:
            src.pos += 1
            return True
        if listed:
            yield from literal(src, "]")
            src.mark()
        if not close:
            # What follows is text, the whitespace just skipped included.
            src.rewind()
            return False
        while src.peek() is None:
            yield
        if not listed and not (yield from leads(src, 0, ((close,),))):
            return True
        yield from literal(src, close)
        return False

    def _call(self, frame: Frame, close: str, rest: list[str], *, bare: bool) -> Wait[bool]:
        """One call. False: it was announced, and could not be read to its end."""
        src = self._src
        while (ch := src.peek()) is None:
            yield
        if frame.objects and ch == "{":
            return (yield from self._object(rest, bare=bare))
        if not frame.head:
            raise Unreadable
        found: dict[str, str] = {}
        yield from parts(src, frame.head, found)
        native = found.get("id", "").strip()
        name = self._name_in(native) if native else found.get("name", "").strip()
        shape = self._offered(name)
        if not (yield from self._confirmed(frame, close)):
            raise Unreadable
        self._start(name, native)
        return (yield from self._rest_of_call(frame, close, shape))

    def _confirmed(self, frame: Frame, close: str) -> Wait[bool]:
        """Whether the text behind a call's head goes on like a call. Where the output was cut there, it does."""
        syntax = frame.arguments
        first = str(syntax.header[0]) if isinstance(syntax, Tagged) else "{"
        if not isinstance(syntax, Tagged) and syntax.assign == "=":
            return True
        if not (yield from leads(self._src, 0, ((first,), *_ends(frame, close)))):
            return False
        try:
            return self._src.peek() is not None
        except Ended:
            return self._src.cut

    def _rest_of_call(self, frame: Frame, close: str, shape: Shape) -> Wait[bool]:
        """The arguments and tail of an announced call, and its end."""
        src, out, syntax = self._src, self._out, frame.arguments
        try:
            if isinstance(syntax, Tagged):
                yield from tagged.arguments(src, syntax, shape, out, _ends(frame, close))
            elif syntax.assign == "=" or not (yield from leads(src, 0, _ends(frame, close))):
                if syntax.assign != "=":
                    while src.peek() is None:
                        yield
                    yield from literal(src, "{")
                yield from Values(src, syntax.nested, out).members(shape, syntax)
            if frame.tail:
                yield from self._tail(frame, close)
        except Unreadable as why:
            self._broken(why)
            return False
        self._end()
        return True

    def _tail(self, frame: Frame, close: str) -> Wait[None]:
        src = self._src
        while src.peek() is None:
            yield
        # The block's end stands for the call's own where that was left out.
        if not close or not (yield from leads(src, 0, ((close,),))):
            yield from parts(src, frame.tail, {})

    def _object(self, rest: list[str], *, bare: bool) -> Wait[bool]:
        try:
            yield from CallObject(self._src, self._out, self._offer, rest, bare=bare).read()
        except Unreadable as why:
            if not self._open:
                raise
            self._broken(why)
            return False
        self._end()
        return True

    def _offer(self, name: str) -> Shape:
        shape = self._offered(name)
        self._start(name)
        return shape

    def _offered(self, name: str) -> Shape:
        tool = self._tools.get(name)
        if tool is None:
            self._complaints.append("a call of a function that was not offered")
            raise Unreadable
        if name not in self._shapes:
            self._shapes[name] = Shape(tool.parameters, tool.parameters or {})
        return self._shapes[name]

    def _name_in(self, native: str) -> str:
        """The function that an id such as `functions.get_weather:0` names."""
        found = _NATIVE_ID.fullmatch(native)
        return native if found is None or native in self._tools else found[1]

    def _start(self, name: str, native: str = "") -> None:
        self._src.pinned = False
        self._src.mark()
        self._announced()
        self._index += 1
        found = _NATIVE_ID.fullmatch(native)
        keeps = found is not None and found[2] and native not in self._ids
        call_id = native if keeps else self._new_id()
        self._ids.add(call_id)
        self._events.append(ToolCallStarted(self._index, call_id, name))
        self._open = True

    def _end(self) -> None:
        self._out.close()
        self.flush()
        self._open = False
        self._events.append(ToolCallEnded(self._index))

    def _broken(self, why: Unreadable) -> None:
        """Close the arguments where they can't be read on; what could not be read is text again."""
        if not isinstance(why, Ended):
            self._complaints.append("arguments that could not be read")
        self._src.rewind()
        self._end()


def _markers(frame: Sequence[object]) -> tuple[str, ...]:
    return tuple(part for part in frame if isinstance(part, str))


def _ends(frame: Frame, close: str) -> tuple[tuple[str, ...], ...]:
    """What may stand behind the arguments of a call."""
    tail = _markers(frame.tail)
    if not close:
        return (tail,) if tail else ()
    if not tail:
        return ((close,),)
    return ((*tail, close), (*tail, *_markers(frame.head[:1])), (close,))
