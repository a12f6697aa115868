"""The formats as data: what the machine takes for granted of them."""

from __future__ import annotations

import pytest

from citadel.messages import Content, Reasoning, ToolCallStarted
from citadel.text.formats import FORMATS, tool_call_id
from citadel.text.machine import Machine
from tests.text.harness import TOOLS, events_of
from tests.text.replay import markers


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_marker_begins_with_another(fmt: str) -> None:
    """Else it would matter whether the text is cut between the two."""
    outer = [frame.open for frame in FORMATS[fmt].frames] + [one.open for one in FORMATS[fmt].thinking]
    assert not [(a, b) for a in outer for b in markers(fmt) if a != b and b.startswith(a)]


def test_ids() -> None:
    assert tool_call_id("hex", 0xAB) == "chatcmpl-tool-00000000000000ab"
    assert tool_call_id("hex", (1 << 70) + 1) == "chatcmpl-tool-0000000000000001"
    assert tool_call_id("alnum9", 0) == "000000000"
    assert tool_call_id("alnum9", 1 + 62 * 61) == "1z0000000"
    assert FORMATS["mistral"].id_style == "alnum9"


def test_kimis_own_ids_are_kept_once() -> None:
    call = "<|tool_call_begin|>functions.ping:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    calls = "".join(map(call.format, (4, 5, 5)))
    raw = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    ids = [event.id for event in events_of("kimi_k2", [raw]) if isinstance(event, ToolCallStarted)]
    assert ids == ["functions.ping:4", "functions.ping:5", "id0"]


def test_offsets_say_how_much_is_decided() -> None:
    events = events_of("hermes", ["<think>\na", "b\n", "</think>\n\nc <tool", "s> d"])
    assert events == [Reasoning("a", 9), Reasoning("b", 10), Content("c ", end=23), Content("<tools> d", end=32)]


def test_reasoning_is_known_while_text_comes() -> None:
    machine = Machine(FORMATS["hermes"], TOOLS, in_reasoning=True, new_id=lambda: "id")
    assert machine.in_reasoning
    machine.feed("so </thin")
    assert machine.in_reasoning
    machine.feed("k>")
    assert not machine.in_reasoning


def test_complaints_hold_no_text() -> None:
    machine = Machine(FORMATS["hermes"], TOOLS, in_reasoning=False, new_id=lambda: "id")
    machine.feed('<tool_call>{"name": "secret"}</tool_call><tool_call>{"name": "ping", "arguments": {secret}}')
    machine.finish(False)
    assert machine.complaints == ["a call of a function that was not offered", "arguments that could not be read"]
