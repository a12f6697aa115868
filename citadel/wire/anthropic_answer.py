"""Events -> Anthropic's message: a sequence of content blocks, streamed, or folded into one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final

import orjson

from citadel import errors
from citadel.errors import CitadelError
from citadel.messages import (
    CallEvent,
    Content,
    Delta,
    Done,
    Embedded,
    Finished,
    Reasoning,
    Started,
    TextEvent,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
    Waiting,
)
from citadel.wire.dialect import Json, Sse

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: Final = {"text": "text", "thinking": "thinking", "signature": "signature", "input_json": "partial_json"}
"""The kinds of delta, and the field that has its text."""


class MessageAnswer:
    """Messages, as a `Dialect`. One block is open at a time.

    A thinking block's signature, which Anthropic checks and nothing here does, is the message's id.
    """

    ends_with_done: ClassVar[bool] = False
    pings: ClassVar[Sse | None] = ("ping", {"type": "ping"})

    def __init__(self, id_: str, model: str) -> None:
        self._id = id_
        self._model = model
        self._open: str | None = None
        self._index = -1
        self._called = False
        self._finished = Finished("stop")

    def stream(self, event: CallEvent) -> Iterator[Sse]:
        match event:
            case Started():
                yield self._start(event.usage)
            case Delta():
                yield from self._say(event.event)
            case Done():
                yield from self._close()
                yield self._end(event.usage)
                yield "message_stop", {"type": "message_stop"}
            case Waiting() | Embedded():
                return

    def failed(self, error: CitadelError) -> list[Sse]:
        return [("error", errors.anthropic_body(error))]

    def whole(self, events: Iterable[CallEvent]) -> Json:
        message: Json = {}
        for _, data in (each for event in events for each in self.stream(event)):
            match data["type"]:
                case "message_start":
                    message = data["message"]
                case "content_block_start":
                    message["content"].append(data["content_block"])
                case "content_block_delta":
                    _grow(message["content"][-1], data["delta"])
                case "message_delta":
                    message |= data["delta"] | {"usage": message["usage"] | data["usage"]}
                case _:
                    continue
        for block in message["content"]:
            if block["type"] == "tool_use":
                block["input"] = orjson.loads(block["input"] or "{}")
        return message

    def _say(self, event: TextEvent) -> Iterator[Sse]:
        match event:
            case Content():
                yield from self._into("text", {"text": ""})
                yield self._delta("text", event.text)
            case Reasoning():
                yield from self._into("thinking", {"thinking": "", "signature": ""})
                yield self._delta("thinking", event.text)
            case ToolCallStarted():
                self._called = True
                yield from self._close()
                yield self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case ToolCallArguments():
                yield self._delta("input_json", event.text)
            case ToolCallEnded():
                yield from self._close()
            case Finished():
                self._finished = event

    def _into(self, kind: str, empty: Json) -> Iterator[Sse]:
        """A block of this kind is open afterwards."""
        if self._open != kind:
            yield from self._close()
            yield self._begin(kind, empty)

    def _begin(self, kind: str, fields: Json) -> Sse:
        self._open = kind
        self._index += 1
        block = {"type": kind, **fields}
        return "content_block_start", {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, text: str) -> Sse:
        delta = {"type": f"{kind}_delta", _DELTAS[kind]: text}
        return "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Sse]:
        if self._open == "thinking":
            yield self._delta("signature", self._id)
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"type": "content_block_stop", "index": self._index}

    def _start(self, counted: Usage) -> Sse:
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(counted),
        }
        return "message_start", {"type": "message_start", "message": message}

    def _end(self, counted: Usage) -> Sse:
        stop, reason = self._finished.stop_sequence, self._finished.reason
        if reason == "stop" and self._called:  # a named function was asked for
            reason = "tool_calls"
        delta = {"stop_reason": "stop_sequence" if stop else _STOP_REASONS[reason], "stop_sequence": stop}
        return "message_delta", {"type": "message_delta", "delta": delta, "usage": _usage(counted)}


def _grow(block: Json, delta: Json) -> None:
    kind = delta["type"].removesuffix("_delta")
    text: Any = delta[_DELTAS[kind]]
    into = "input" if kind == "input_json" else kind
    block[into] = (block[into] or "") + text


def _usage(counted: Usage) -> Json:
    """Anthropic's `input_tokens` are those that were not read from the cache."""
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.completion,
    }
