"""Whatever a model writes: no exception, valid JSON, and every word comes out somewhere, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from citadel.messages import ToolCallStarted
from citadel.text.formats import FORMATS
from tests.text.harness import check_stream, events_of, fold
from tests.text.replay import markers

COMMON = (
    *"\"{}[],:\n <>/=1-\\'();",
    '{"name": "',
    '", "arguments": {',
    '"city": "',
    '"days": ',
    "ping",
    "get_weather",
    "functions.ping:0",
    "\\u00e9",
    "\\ud83d",
    "true",
    "nul",
    "</",
    "<|",
    "<|message|>",
    "<|channel|>",
    "<|start|>assistant",
    "<|end|>",
    "<think>",
    "</think>",
    "analysis",
    "final",
    " to=functions.ping",
    "é😀",
)


def fragments(fmt: str) -> st.SearchStrategy[str]:
    whole = markers(fmt)
    known = [*COMMON, *whole, *(marker[:-1] for marker in whole if len(marker) > 2)]
    return st.sampled_from(known)


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_exception_escapes_and_no_word_is_lost(fmt: str) -> None:
    @settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.one_of(st.none(), fragments(fmt), fragments(fmt), fragments(fmt)), max_size=30),
        st.booleans(),
        st.booleans(),
    )
    def holds(parts: list[str | None], thinking: bool, cut: bool) -> None:
        # Each None is a word found nowhere else, so that its loss shows.
        pieces = [f"w{number}x" if part is None else part for number, part in enumerate(parts)]
        raw = "".join(pieces)
        events = events_of(fmt, [raw], thinking=thinking, cut=cut)
        check_stream(events, raw)
        answer = fold(events)
        assert answer == fold(events_of(fmt, list(raw), thinking=thinking, cut=cut))
        assert answer == fold(events_of(fmt, pieces, thinking=thinking, cut=cut))
        said = (answer.reasoning or "") + (answer.content or "") + json.dumps(answer.calls)
        said += "".join(event.id for event in events if isinstance(event, ToolCallStarted))
        assert [word for word, part in zip(pieces, parts, strict=True) if part is None and word not in said] == []

    holds()


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_tools_only_reasoning_is_told_apart(fmt: str) -> None:
    if FORMATS[fmt].channels:
        pytest.skip("its messages have headers with tools or without")

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(fragments(fmt), max_size=20))
    def holds(pieces: list[str]) -> None:
        raw = "".join(pieces)
        answer = fold(events_of(fmt, pieces, tools=()))
        assert not answer.calls
        if not any(thinking.open in raw or thinking.close in raw for thinking in FORMATS[fmt].thinking):
            assert (answer.content or "") == raw

    holds()
