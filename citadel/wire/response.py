"""Events -> OpenAI's JSON: as chunks of a stream, or folded into one answer. There is no second way to an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

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
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
    Waiting,
)
from citadel.wire.dialect import Json, Sse

TEXT: Final = "\0the text\0"
"""Stands for the text in a chunk that is given to `around`."""


@dataclass(frozen=True, slots=True)
class Answering:
    """What all of one call's JSON has in common. `model` is the name that the caller asked for."""

    id: str
    created: int
    model: str
    n: int
    include_usage: bool
    continuous_usage: bool
    reasoning_content: bool
    """Whether reasoning is said a second time under the name `reasoning_content`."""

    def envelope(self, kind: str, fingerprint: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint,
            "choices": choices,
        }


class ChatAnswer:
    """Chat completions, as a `Dialect`."""

    ends_with_done: ClassVar[bool] = True
    pings: ClassVar[Sse | None] = None

    def __init__(self, answering: Answering, *, logprobs: bool) -> None:
        self._answering = answering
        self._logprobs = logprobs
        self._fingerprint = ""
        self._written: dict[tuple[int, type[Content | Reasoning]], list[bytes]] = {}
        """The chunks of a choice's text, written once and cut where the text goes: nearly all chunks are such."""

    def stream(self, event: CallEvent) -> Iterable[Sse] | bytes:
        if isinstance(event, Delta) and isinstance(said := event.event, (Content, Reasoning)):
            if not (self._answering.continuous_usage or (isinstance(said, Content) and said.logprobs)):
                return orjson.dumps(said.text).join(self._around(event.choice, type(said)))
        elif isinstance(event, Started):
            self._fingerprint = event.fingerprint
        return [(None, chunk) for chunk in chunks(self._answering, event, self._fingerprint)]

    def _around(self, choice: int, kind: type[Content | Reasoning]) -> list[bytes]:
        """What stands around the text of a chunk."""
        parts = self._written.get((choice, kind))
        if parts is None:
            chunk = _delta_chunk(self._answering, Delta(choice, kind(TEXT), Usage()), self._fingerprint)
            parts = self._written[choice, kind] = around(chunk)
        return parts

    def failed(self, error: CitadelError) -> list[Sse]:
        return [(None, errors.openai_body(error, in_stream=True))]

    def whole(self, events: Iterable[CallEvent]) -> Json:
        return fold(self._answering, events, logprobs=self._logprobs)


def around(chunk: Json) -> list[bytes]:
    """The event that sends `chunk`, cut wherever `TEXT` stands in it; joined with a text in JSON it has that text."""
    return (b"data: %b\n\n" % orjson.dumps(chunk)).split(orjson.dumps(TEXT))


def chunks(answering: Answering, event: CallEvent, fingerprint: str) -> Iterator[Json]:
    """The chunks that say `event`; none for one that callers are not told."""
    match event:
        case Started():
            for choice in range(answering.n):
                delta: Json = {"role": "assistant", "content": ""}
                yield _chunk(answering, fingerprint, choice, delta, None, event.usage)
        case Delta(event=ToolCallEnded()) | Waiting() | Embedded():
            return
        case Delta():
            yield _delta_chunk(answering, event, fingerprint)
        case Done() if answering.include_usage:
            chunk = answering.envelope("chat.completion.chunk", fingerprint, [])
            yield {**chunk, "usage": usage(event.usage)}
        case Done():
            return


def _delta_chunk(answering: Answering, delta: Delta, fingerprint: str) -> Json:
    event = delta.event
    reason = event.reason if isinstance(event, Finished) else None
    chunk = _chunk(answering, fingerprint, delta.choice, _delta(answering, event), reason, delta.usage)
    if isinstance(event, Content) and event.logprobs:
        chunk["choices"][0]["logprobs"] = {"content": [_logprob(each) for each in event.logprobs]}
    return chunk


def _delta(answering: Answering, event: TextEvent) -> Json:
    match event:
        case Content():
            return {"content": event.text}
        case Reasoning():
            return _reasoning(answering, event.text)
        case ToolCallStarted():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        case _:
            return {}


def _chunk(answering: Answering, fingerprint: str, choice: int, delta: Json, reason: str | None, so_far: Usage) -> Json:
    choices: list[Json] = [{"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}]
    chunk = answering.envelope("chat.completion.chunk", fingerprint, choices)
    if answering.include_usage:
        chunk["usage"] = usage(so_far) if answering.continuous_usage else None
    return chunk


@dataclass(slots=True)
class _Choice:
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, Json] = field(default_factory=dict[int, Json])
    logprobs: list[Json] = field(default_factory=list[Json])
    reason: str | None = None

    def add(self, event: TextEvent) -> None:
        match event:
            case Content():
                self.content.append(event.text)
                self.logprobs += [_logprob(each) for each in event.logprobs]
            case Reasoning():
                self.reasoning.append(event.text)
            case ToolCallStarted():
                function = {"name": event.name, "arguments": ""}
                self.calls[event.index] = {"id": event.id, "type": "function", "function": function}
            case ToolCallArguments():
                self.calls[event.index]["function"]["arguments"] += event.text
            case Finished():
                self.reason = event.reason
            case ToolCallEnded():
                return


def fold(answering: Answering, events: Iterable[CallEvent], *, logprobs: bool) -> Json:
    """The whole answer, from the events that a stream would have sent."""
    choices = [_Choice() for _ in range(answering.n)]
    fingerprint, total = "", Usage()
    for event in events:
        match event:
            case Started():
                fingerprint = event.fingerprint
            case Delta():
                choices[event.choice].add(event.event)
            case Done():
                total = event.usage
            case Waiting() | Embedded():
                continue
    answers = [_answer(answering, index, choice, logprobs=logprobs) for index, choice in enumerate(choices)]
    return {**answering.envelope("chat.completion", fingerprint, answers), "usage": usage(total)}


def _answer(answering: Answering, index: int, choice: _Choice, *, logprobs: bool) -> Json:
    content = "".join(choice.content)
    message: Json = {
        "role": "assistant",
        "content": content if content or not choice.calls else None,
        **_reasoning(answering, "".join(choice.reasoning) or None),
    }
    if choice.calls:
        message["tool_calls"] = list(choice.calls.values())
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": choice.logprobs} if logprobs else None,
        "finish_reason": choice.reason,
    }


def _reasoning(answering: Answering, text: str | None) -> Json:
    return {"reasoning": text, "reasoning_content": text} if answering.reasoning_content else {"reasoning": text}


def _logprob(token: TokenLogprob) -> Json:
    return {**_token(token), "top_logprobs": [_token(each) for each in token.top]}


def _token(token: TokenLogprob) -> Json:
    text = token.text.decode("utf-8", errors="replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.text)}


def usage(counted: Usage) -> Json:
    return {
        "prompt_tokens": counted.prompt,
        "completion_tokens": counted.completion,
        "total_tokens": counted.prompt + counted.completion,
        "prompt_tokens_details": {"cached_tokens": counted.cached},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning},
    }
