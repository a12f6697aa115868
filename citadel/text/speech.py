"""Text that is no call, told apart into reasoning and content; and the one rule about whitespace.

The rule: line breaks right after the opening marker of reasoning, right before its closing one (or before the call
that ends it), and between it and what follows are the frame's, and so is whitespace before a first call that no
text precedes, between calls, and after the last one at the end of the output. All else is kept.
"""

from __future__ import annotations

from enum import Enum

from citadel.messages import Content, Reasoning, TextEvent


class Gap(Enum):
    """What came before text that has not begun yet."""

    START = "start"
    THINKING = "thinking"
    CALL = "call"


class Speech:
    """Makes `Reasoning` and `Content` events. `gap` is None in the midst of content."""

    __slots__ = ("_blank", "_events", "_fresh", "_held", "gap", "reasoning")

    def __init__(self, events: list[TextEvent], *, reasoning: bool) -> None:
        self._events = events
        self.reasoning = reasoning
        self.gap: Gap | None = None if reasoning else Gap.START
        self._fresh = reasoning
        self._held = ""
        self._blank: list[str] = []

    @property
    def fresh(self) -> bool:
        """Reasoning has been opened and nothing was said in it."""
        return self._fresh

    def say(self, text: str, end: int) -> None:
        """`text` of the output, of which `end` characters have been read with it."""
        if not text:
            return
        if self.reasoning:
            self._reason(text, end)
        elif self.gap is None:
            self._events.append(Content(text, end=end))
        else:
            self._begin(text, end)

    def _reason(self, text: str, end: int) -> None:
        if self._fresh:
            text = text.lstrip("\n")
            if not text:
                return
            self._fresh = False
        if text[-1] != "\n" and not self._held:
            self._events.append(Reasoning(text, end))
            return
        body = text.rstrip("\n")
        if body:
            self._events.append(Reasoning(self._held + body, end - (len(text) - len(body))))
            self._held = text[len(body) :]
        else:
            self._held += text

    def _begin(self, text: str, end: int) -> None:
        if self.gap is Gap.THINKING and not self._blank:
            text = text.lstrip("\n")
        if not text.strip():
            if text:
                self._blank.append(text)
            return
        self.gap = None
        self._events.append(Content("".join((*self._blank, text)), end=end))
        self._blank.clear()

    def open_reasoning(self) -> None:
        self._blank.clear()
        self.reasoning = True
        self.gap = None
        self._fresh = True

    def close_reasoning(self) -> None:
        """The line breaks held back were the frame's."""
        self._held = ""
        self._blank.clear()
        self.reasoning = self._fresh = False
        self.gap = Gap.THINKING

    def call(self) -> None:
        """A call begins here; it ends reasoning."""
        self._held = ""
        self._blank.clear()
        self.reasoning = self._fresh = False
        self.gap = Gap.CALL

    def finish(self, end: int) -> None:
        """The output is over: what was held back is said, but for whitespace after a call."""
        if self._held:
            self._events.append(Reasoning(self._held, end))
        blank = "".join(self._blank)
        if blank and self.gap is not Gap.CALL:
            self._events.append(Content(blank, end=end))
        self._held = ""
        self._blank.clear()
