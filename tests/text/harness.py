"""Runs a text through the machine in pieces, and folds the events into one answer, checking the stream's promises."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from citadel.messages import (
    Content,
    Reasoning,
    TextEvent,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    ToolSpec,
)
from citadel.text.formats import FORMATS
from citadel.text.machine import Machine

Calls = tuple[tuple[str, dict[str, Any]], ...]


def tool(name: str, required: Sequence[str] = (), **properties: Any) -> ToolSpec:
    return ToolSpec(name, parameters={"type": "object", "properties": properties, "required": list(required)})


TOOLS = (
    tool("get_weather", ("city",), city={"type": "string"}, days={"type": "integer"}),
    tool("write", path={"type": "string"}, text={"type": "string"}),
    tool("ping"),
    tool(
        "search",
        query={"type": "string"},
        limit={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        exact={"type": "boolean"},
        score={"type": "number"},
        where={"$ref": "#/$defs/place"},
        tags={"type": "array", "items": {"type": "string"}},
        note={"type": ["string", "null"]},
        key={"anyOf": [{"type": "string"}, {"type": "integer"}]},
        mode={"enum": ["fast", "slow"]},
    ),
)
TOOLS[3].parameters["$defs"] = {  # type: ignore[index]
    "place": {
        "type": "object",
        "properties": {"lat": {"type": "number"}, "zoom": {"type": "integer"}, "name": {"type": "string"}},
    }
}


@dataclass(frozen=True, slots=True)
class Answer:
    reasoning: str | None = None
    content: str | None = None
    calls: Calls = ()


@dataclass(frozen=True, slots=True)
class Case:
    """`thinking`: the prompt has opened reasoning. `cut`: the token limit ended the output."""

    name: str
    raw: str
    want: Answer
    thinking: bool = False
    cut: bool = False
    tools: tuple[ToolSpec, ...] = TOOLS


def events_of(
    fmt: str,
    pieces: Iterable[str],
    *,
    tools: Sequence[ToolSpec] = TOOLS,
    thinking: bool = False,
    cut: bool = False,
    ended: bool = True,
) -> list[TextEvent]:
    numbers = count()
    machine = Machine(FORMATS[fmt], tools, in_reasoning=thinking, new_id=lambda: f"id{next(numbers)}")
    events: list[TextEvent] = []
    for piece in pieces:
        events += machine.feed(piece)
    return events + machine.finish(cut) if ended else events


def fold(events: Iterable[TextEvent]) -> Answer:
    """The answer that a client puts together; arguments that are no JSON object fail here."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, ToolCallStarted):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
    calls = tuple((name, json.loads("".join(text))) for name, text in zip(names, arguments, strict=True))
    assert all(isinstance(values, dict) for _, values in calls)
    return Answer("".join(reasoning) or None, "".join(content) or None, calls)


def check_stream(events: Sequence[TextEvent], raw: str) -> None:
    """What every stream promises, whatever the text: order, no empty events, offsets that only grow."""
    opened = -1
    is_open = False
    end = 0
    for event in events:
        if isinstance(event, Reasoning | Content):
            assert not is_open
            assert event.text
            assert end <= event.end <= len(raw)
            end = event.end
        elif isinstance(event, ToolCallStarted):
            assert not is_open
            assert event.index == opened + 1
            opened, is_open = event.index, True
        elif isinstance(event, ToolCallArguments):
            assert is_open
            assert event.text
            assert event.index == opened
        elif isinstance(event, ToolCallEnded):
            assert is_open
            assert event.index == opened
            is_open = False
        else:
            pytest.fail(f"no event of a stream: {event}")
    assert not is_open
