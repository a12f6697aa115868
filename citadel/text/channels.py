"""Outputs made of messages whose headers say what they are (harmony, gpt-oss).

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are content, and a message to
`functions.NAME` is a call. The prompt ends inside the first header, so the output may begin with its recipient.
"""

from __future__ import annotations

import re
from typing import Final

from citadel.text.calls import Calls
from citadel.text.lexer import MAX_NAME, Ended, Source, Unreadable, Wait, watch
from citadel.text.speech import Gap, Speech

RECIPIENT: Final = " to="
_HEADERS: Final = ("<|start|>", "<|channel|>")
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
MARKERS: Final = (*_HEADERS, *_ENDS)

_MESSAGE: Final = "<|message|>"
_to: Final = re.compile(r"\bto=([^\s<]+)").search
_channel: Final = re.compile(r"<\|channel\|>\s*(\w*)").search
_known: Final = re.compile(
    r"<\|start\|>\s*assistant|<\|channel\|>\s*\w+|\bto=[^\s<]+|<\|constrain\|>|\b(?:json|code|text)\b|\s+"
)
"""What a header may hold. Models now and then write more, which must not cost the message."""


class Channels:
    """Handles the markers of messages. `marker` says whether the one at hand was used; if not, it is text."""

    def __init__(self, src: Source, speech: Speech, calls: Calls) -> None:
        self._src = src
        self._speech = speech
        self._calls = calls

    def marker(self, marker: str) -> Wait[bool]:
        src, speech = self._src, self._speech
        if marker in _ENDS:
            src.pos += len(marker)
            if speech.reasoning:
                speech.close_reasoning()
            return True
        if marker == RECIPIENT and speech.gap is not Gap.START:
            return False
        src.mark()
        src.pinned = True
        try:
            yield from self._open((yield from _header(src, marker)))
        except Unreadable:
            src.rewind()
            return False
        return True

    def _open(self, header: str) -> Wait[None]:
        src, speech = self._src, self._speech
        extra = _known.sub("", header)
        if "<|" in extra or header.count("<|channel|>") > 1 or "<|start|>" in header[1:]:
            raise Unreadable
        found = _channel(header)
        channel = found[1] if found else ""
        recipient = _to(header)
        if channel not in ("analysis", "commentary", "final", ""):
            raise Unreadable
        if recipient is not None:
            yield from self._calls.message(recipient[1].removeprefix("functions."))
        elif channel == "analysis":
            speech.open_reasoning()
        elif speech.reasoning:
            speech.close_reasoning()
        src.pinned = False
        src.unmark()
        speech.say(extra, src.offset)


def _header(src: Source, marker: str) -> Wait[str]:
    """Everything up to the message itself, whose marker is used up too."""
    src.pos += len(marker)
    search = watch((_MESSAGE, *_ENDS))
    seen = 0
    while True:
        found = search(src.buf, src.pos + seen)
        seen = (len(src.buf) if found is None else found.start()) - src.pos
        if seen > MAX_NAME or (found is not None and found.lastindex is not None and found.group() != _MESSAGE):
            raise Unreadable
        if found is not None and found.lastindex is not None:
            text = src.buf[src.pos : src.pos + seen]
            src.pos = found.end()
            return marker + text
        if src.closed:
            raise Ended
        yield
