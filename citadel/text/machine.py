"""The machine that understands a model's output: text in, however it is cut, events out.

It is one generator (`_run`) that reads a `Source` and suspends where more text is needed. Between markers it says
text as it comes (`Speech`); at a marker that may begin a call it lets `Calls` try, and says the marker as text where
there was none. Nothing is lost: a character is said, is part of a call, or belongs to a marker that was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from citadel.messages import TextEvent, ToolSpec
from citadel.text import channels
from citadel.text.calls import Calls
from citadel.text.formats import Format, Frame
from citadel.text.lexer import Search, Source, Wait, watch
from citadel.text.speech import Gap, Speech


class Machine:
    """Understands one output in one format.

    Without `tools` no calls are opened: their markers are text. `new_id` makes the ids of calls that bring none.
    `complaints` says what could not be read, without a word of the text.
    """

    def __init__(
        self, fmt: Format, tools: Sequence[ToolSpec], *, in_reasoning: bool, new_id: Callable[[], str]
    ) -> None:
        self.complaints: list[str] = []
        self._events: list[TextEvent] = []
        self._src = Source()
        self._speech = Speech(self._events, reasoning=in_reasoning)
        self._calls = Calls(
            self._src,
            tools,
            self._events,
            new_id=new_id,
            announced=self._speech.call,
            complaints=self.complaints,
        )
        self._channels = channels.Channels(self._src, self._speech, self._calls) if fmt.channels else None
        frames = fmt.frames if tools else ()
        self._frames = _by_marker(frames)
        self._bare = {frame.bare: frame for frame in frames if frame.bare}
        thinking = () if fmt.channels else fmt.thinking
        self._opens = {one.open: one.anywhere for one in thinking}
        self._answer = [marker for one in thinking for marker in one.answer]
        self._closes = tuple(one.close for one in thinking)
        self._owed: list[str] = []
        self._searches: dict[tuple[bool, bool], Search] = {}
        self._reader = self._run()
        next(self._reader)

    @property
    def in_reasoning(self) -> bool:
        return self._speech.reasoning

    def feed(self, text: str) -> list[TextEvent]:
        """What `text`, the next part of the output, makes known."""
        self._src.push(text)
        next(self._reader)
        return self._take()

    def finish(self, cut: bool) -> list[TextEvent]:
        """What the end of the output makes known. `cut`: its length ended it, not the model."""
        self._src.close(cut=cut)
        for _ in self._reader:
            pass
        self._speech.finish(self._src.offset)
        return self._take()

    def _take(self) -> list[TextEvent]:
        self._calls.flush()
        events = self._events.copy()
        self._events.clear()
        return events

    def _run(self) -> Wait[None]:
        src, speech = self._src, self._speech
        while True:
            if src.pos == len(src.buf):
                if src.closed:
                    return
                yield
                continue
            if speech.gap is not None and self._bare and (yield from self._unmarked()):
                continue
            found = self._search()(src.buf, src.pos)
            self._say(len(src.buf) if found is None else found.start())
            if found is None:
                continue
            if found.lastindex is not None:
                yield from self._marker(found.group())
            elif src.closed:
                self._say(len(src.buf))
            else:
                yield

    def _say(self, until: int) -> None:
        src = self._src
        pos, src.pos = src.pos, until
        self._speech.say(src.buf[pos:until], src.offset)

    def _search(self) -> Search:
        """The search for what matters in the present state."""
        speech = self._speech
        early = speech.fresh if speech.reasoning else speech.gap is Gap.START
        search = self._searches.get((speech.reasoning, early))
        if search is None:
            markers = {*self._frames, *(opened for opened, anywhere in self._opens.items() if early or anywhere)}
            if speech.reasoning or early:
                markers.update(self._closes)
            if not speech.reasoning:
                markers.update(self._owed)
            if self._channels is not None:
                markers.update(channels.MARKERS, (channels.RECIPIENT,) if early else ())
            search = self._searches[speech.reasoning, early] = watch(tuple(sorted(markers)))
        return search

    def _marker(self, marker: str) -> Wait[None]:
        """Use the marker at hand, or say it."""
        src, speech = self._src, self._speech
        if self._channels is not None:
            if (yield from self._channels.marker(marker)):
                return
        elif self._reasons(marker):
            src.pos += len(marker)
            return
        elif not speech.reasoning and marker in self._owed:
            src.pos += len(marker)
            self._owe([owed for owed in self._owed if owed != marker])
            return
        elif marker in self._frames and (yield from self._block(self._frames[marker], marker)):
            return
        self._say(src.pos + len(marker))

    def _reasons(self, marker: str) -> bool:
        """Whether the marker opens or closes reasoning here, which is done then."""
        speech = self._speech
        start = speech.gap is Gap.START
        if marker in self._closes and (speech.reasoning or start):
            speech.close_reasoning()
            self._owe(self._answer)
            return True
        if marker in self._opens and speech.reasoning:
            # Where the prompt has opened reasoning, some models open it again.
            return speech.fresh
        if marker in self._opens and (start or self._opens[marker]):
            speech.open_reasoning()
            return True
        return False

    def _block(self, frame: Frame, opener: str) -> Wait[bool]:
        reasoning = self._speech.reasoning
        block = yield from self._calls.block(frame, opener)
        if not block.calls:
            return False
        # A call on its own may stand in a block that an earlier call could not be read in: its end is still to come.
        before = self._owed if opener != frame.open else ()
        self._owe([*before, *block.owed, *(self._closes if reasoning else ())])
        for text in block.rest:
            self._speech.say(text, self._src.offset)
        return True

    def _owe(self, markers: list[str]) -> None:
        """From now on the next of each of these markers is the frame's, not text."""
        if markers != self._owed:
            self._owed = markers
            self._searches.clear()

    def _unmarked(self) -> Wait[bool]:
        """Calls without a marker, at the start of an answer. False: the text here begins none."""
        src = self._src
        while src.pos < len(src.buf) and src.buf[src.pos].isspace():
            self._say(src.pos + 1)
        if src.pos == len(src.buf):
            return True
        frame = self._bare.get(src.buf[src.pos])
        if frame is None:
            return False
        if not (yield from self._block(frame, "")):
            self._say(src.pos + 1)
        return True


def _by_marker(frames: Sequence[Frame]) -> dict[str, Frame]:
    """The frames by what may begin a call: a block's marker, or the head of a call."""
    found: dict[str, Frame] = {}
    for frame in frames:
        found[frame.open] = frame
        if frame.loose and frame.head and isinstance(frame.head[0], str):
            found.setdefault(frame.head[0], frame)
    return found
