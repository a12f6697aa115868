"""Events -> OpenAI's response: a sequence of items, streamed, the last event being the whole response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from citadel import errors
from citadel.errors import CitadelError
from citadel.messages import (
    CallEvent,
    ChatRequest,
    Content,
    Delta,
    Done,
    Embedded,
    Finished,
    NamedTool,
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

_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
"""Items that hold one part of text, and its type."""
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}

Kind = Literal["message", "reasoning", "function_call"]


@dataclass(slots=True)
class _Open:
    """The item that is being said."""

    kind: Kind
    id: str
    fields: Json
    text: str = ""

    def item(self, status: str) -> Json:
        if self.kind == "function_call":
            rest = {**self.fields, "arguments": self.text, "status": status}
        else:
            content = [self.part()] if self.text or status == "completed" else []
            rest = {"content": content, "status": status, **self.fields}
        return {"id": self.id, "type": self.kind, **rest}

    def part(self) -> Json:
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PARTS[self.kind], "text": self.text, **extra}


class ResponseAnswer:
    """Responses, as a `Dialect`."""

    ends_with_done: ClassVar[bool] = False
    pings: ClassVar[Sse | None] = None

    def __init__(self, id_: str, created: int, request: ChatRequest) -> None:
        self._id = id_
        self._response = _response(f"resp_{id_}", created, request)
        self._number = -1
        self._open: _Open | None = None
        self._cut = False

    def stream(self, event: CallEvent) -> Iterator[Sse]:
        match event:
            case Started():
                yield self._event("response.created", response=self._so_far())
                yield self._event("response.in_progress", response=self._so_far())
            case Delta():
                yield from self._say(event.event)
            case Done():
                yield from self._close()
                self._response["usage"] = _usage(event.usage)
                if self._cut:
                    self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
                else:
                    self._response["status"] = "completed"
                yield self._event(f"response.{self._response['status']}", response=self._so_far())
            case Waiting() | Embedded():
                return

    def failed(self, error: CitadelError) -> list[Sse]:
        """One event that is OpenAI's `error`, and has also the body that its SDK raises from."""
        body = errors.openai_body(error, in_stream=True)
        told = {name: body["error"].get(name) for name in ("code", "message", "param")}
        return [self._event("error", **told, **body)]

    def whole(self, events: Iterable[CallEvent]) -> Json:
        for event in events:
            for _ in self.stream(event):
                pass
        return self._response

    def _say(self, event: TextEvent) -> Iterator[Sse]:
        match event:
            case Content():
                yield from self._add("message", event.text, {"role": "assistant"})
            case Reasoning():
                yield from self._add("reasoning", event.text, {"summary": []})
            case ToolCallStarted():
                yield from self._close()
                yield from self._begin("function_call", {"call_id": event.id, "name": event.name})
            case ToolCallArguments() if self._open is not None:
                self._open.text += event.text
                yield self._in_item(self._open, "response.function_call_arguments.delta", delta=event.text)
            case ToolCallEnded() | ToolCallArguments():
                yield from self._close()
            case Finished():
                self._cut = event.reason == "length"

    def _add(self, kind: Kind, text: str, fields: Json) -> Iterator[Sse]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield from self._begin(kind, fields)
        assert self._open is not None
        self._open.text += text
        extra: Json = {"logprobs": []} if kind == "message" else {}
        yield self._in_item(self._open, f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **extra)

    def _begin(self, kind: Kind, fields: Json) -> Iterator[Sse]:
        index = len(self._response["output"])
        opened = self._open = _Open(kind, f"{_PREFIXES[kind]}_{self._id}_{index}", fields)
        yield self._event("response.output_item.added", output_index=index, item=opened.item("in_progress"))
        if kind in _PARTS:
            yield self._in_item(opened, "response.content_part.added", content_index=0, part=opened.part())

    def _close(self) -> Iterator[Sse]:
        opened = self._open
        if opened is None:
            return
        if opened.kind == "function_call":
            said: Json = {"arguments": opened.text, "name": opened.fields["name"]}
            yield self._in_item(opened, "response.function_call_arguments.done", **said)
        else:
            extra: Json = {"logprobs": []} if opened.kind == "message" else {}
            kind = f"response.{_PARTS[opened.kind]}.done"
            yield self._in_item(opened, kind, content_index=0, text=opened.text, **extra)
            yield self._in_item(opened, "response.content_part.done", content_index=0, part=opened.part())
        item = opened.item("completed")
        yield self._event("response.output_item.done", output_index=len(self._response["output"]), item=item)
        self._response["output"].append(item)
        self._open = None

    def _in_item(self, opened: _Open, kind: str, **fields: Any) -> Sse:
        return self._event(kind, item_id=opened.id, output_index=len(self._response["output"]), **fields)

    def _event(self, kind: str, **fields: Any) -> Sse:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number, **fields}

    def _so_far(self) -> Json:
        return {**self._response, "output": list(self._response["output"])}


def _response(id_: str, created: int, request: ChatRequest) -> Json:
    """What is known before anything was said. Fields of the request are echoed, as clients expect them."""
    sampling, asked = request.sampling, request.response_format
    choice = request.tool_choice
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": sampling.max_tokens,
        "metadata": {},
        "model": request.requested_model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": request.template_kwargs.get("reasoning_effort"), "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"name": "answer", **asked} if asked else {"type": "text"}},
        "tool_choice": {"type": "function", "name": choice.name} if isinstance(choice, NamedTool) else choice,
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in request.tools
        ],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(counted: Usage) -> Json:
    return {
        "input_tokens": counted.prompt,
        "input_tokens_details": {"cached_tokens": counted.cached, "cache_write_tokens": 0},
        "output_tokens": counted.completion,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning},
        "total_tokens": counted.prompt + counted.completion,
    }
