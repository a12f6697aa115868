"""One choice's output, from the engine's pieces to events: understood, stopped, counted, and its logprobs paired.

The format's machine understands the text; this adds what is said of tokens. Tokens are counted where they came: a
piece that ends the reasoning is split at the token that closes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from citadel.engine import Piece
from citadel.messages import (
    Content,
    Finished,
    FinishReason,
    Reasoning,
    TextEvent,
    TokenLogprob,
    ToolCallEnded,
    ToolSpec,
)
from citadel.text.formats import Format
from citadel.text.machine import Machine
from citadel.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Reading:
    """How an output is to be read. `call_is_the_answer`: a named function was asked for, so its call ends with `stop`.

    `reasoning_end_ids` are the tokens that close reasoning, where its marker is a single token.
    """

    format: Format
    tools: Sequence[ToolSpec]
    in_reasoning: bool
    stops: Sequence[str]
    call_is_the_answer: bool
    reasoning_end_ids: frozenset[int]
    new_id: Callable[[], str]


class Reader:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._machine = Machine(reading.format, reading.tools, in_reasoning=reading.in_reasoning, new_id=reading.new_id)
        self._stops = StopMatcher(reading.stops)
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        """Not yet paired, each with the number of characters of raw output up to its piece's end."""
        self._plain = not reading.stops
        """No text is held back for a stop string, so events without logprobs are shown as they are."""
        self._read = 0
        self._calls = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.finished = False

    @property
    def complaints(self) -> Sequence[str]:
        return self._machine.complaints

    @property
    def in_reasoning(self) -> bool:
        return self._machine.in_reasoning

    def feed(self, piece: Piece) -> list[TextEvent]:
        """Events of this piece; the last ever is `Finished`."""
        was_reasoning = self._machine.in_reasoning
        self._read += len(piece.text)
        if piece.logprobs:
            self._logprobs.extend((self._read, each) for each in piece.logprobs)
        events = self._machine.feed(piece.text)
        self._count(piece, was_reasoning=was_reasoning)
        if piece.finish is not None:
            events += self._machine.finish(cut=piece.finish == "length")
        if self._plain and not self._logprobs and piece.finish is None:
            for event in events:
                if isinstance(event, ToolCallEnded):
                    self._calls += 1
            return events
        shown: list[TextEvent] = []
        for event in events:
            shown += self._shown(event)
            if self._stops.matched:  # what follows the match is not sent, whatever it is
                return [*shown, self._finish("stop")]
        if piece.finish is None:
            return shown
        if held := self._stops.flush():
            shown.append(Content(held, self._paired(self._read), end=self._read))
        return [*shown, self._finish(piece.finish)]

    def _finish(self, reason: FinishReason) -> Finished:
        self.finished = True
        if reason == "stop" and self._calls and not self._reading.call_is_the_answer:
            reason = "tool_calls"
        return Finished(reason, self._stops.match)

    def _shown(self, event: TextEvent) -> list[TextEvent]:
        match event:
            case Content():
                start = event.end - len(event.text) - self._stops.held
                self._paired(start)  # of markers and arguments before it
                text = self._stops.feed(event.text)
                logprobs = self._paired(start + len(text))
                return [Content(text, logprobs, event.end)] if text else []
            case Reasoning():
                self._paired(event.end)
                return [event]
            case ToolCallEnded():
                self._calls += 1
                return [event]
            case _:
                return [event]

    def _paired(self, end: int) -> tuple[TokenLogprob, ...]:
        """The logprobs of the tokens whose text lies before `end`."""
        paired: list[TokenLogprob] = []
        while self._logprobs and self._logprobs[0][0] <= end:
            paired.append(self._logprobs.popleft()[1])
        return tuple(paired)

    def _count(self, piece: Piece, *, was_reasoning: bool) -> None:
        tokens = len(piece.token_ids)
        self.completion_tokens += tokens
        if self._machine.in_reasoning:
            self.reasoning_tokens += tokens
        elif was_reasoning:
            ends = self._reading.reasoning_end_ids
            last = tokens - 1
            self.reasoning_tokens += next(
                (at for at, token in enumerate(piece.token_ids) if token in ends), max(0, last)
            )
