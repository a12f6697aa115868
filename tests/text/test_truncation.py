"""An output that ends anywhere: what was sent stays true, arguments are JSON, and no word is lost."""

from __future__ import annotations

import re

import pytest

from citadel.messages import ToolCallArguments
from tests.text.harness import Answer, events_of, fold
from tests.text.styles import STYLES, Do, Say, Think, js

CALLS = (
    (
        "search",
        {"query": 'alpha "beta" 😀', "where": {"lat": 1.5, "name": "gamma"}, "tags": ["delta", "eps"], "limit": 12},
    ),
    ("write", {"path": "zeta", "text": "eta\ntheta\n"}),
)
PARTS = (Think("iota kappa"), Say("lambda mu "), Do(*CALLS))
WORD = re.compile(r"alpha|beta|gamma|delta|eps|zeta|eta|theta|iota|kappa|lambda|mu")


@pytest.mark.parametrize("cut", [True, False], ids=["length", "stop"])
@pytest.mark.parametrize("fmt", STYLES)
def test_cut_at_every_position(fmt: str, cut: bool) -> None:
    raw = STYLES[fmt].render(PARTS)
    whole = fold(events_of(fmt, [raw]))
    assert whole == Answer("iota kappa", "lambda mu ", CALLS)
    for end in range(len(raw)):
        text = raw[:end]
        answer = fold(events_of(fmt, [text], cut=cut))
        assert answer == fold(events_of(fmt, [text[:-9], text[-9:]], cut=cut)), text
        assert [name for name, _ in answer.calls] == [name for name, _ in CALLS][: len(answer.calls)], text
        assert "iota kappa".startswith((answer.reasoning or "")[: len("iota kappa")]), text
        said = (answer.reasoning or "") + (answer.content or "") + js(answer.calls)
        assert set(WORD.findall(text)) <= set(WORD.findall(said)), text


@pytest.mark.parametrize("fmt", STYLES)
def test_arguments_are_sent_as_they_come(fmt: str) -> None:
    """A long text must not wait for its end: with half of it read, about half of it has been sent."""
    raw = STYLES[fmt].render((Do(("write", {"path": "p", "text": "word " * 200})),))
    half = raw[: raw.index("word ") + 500]
    assert len(sent_for(fmt, half)) > 480


@pytest.mark.parametrize("fmt", STYLES)
def test_what_was_sent_is_never_taken_back(fmt: str) -> None:
    """The arguments sent for a beginning of the output are a beginning of the arguments."""
    raw = STYLES[fmt].render((Do(CALLS[0]),))
    full = sent_for(fmt, raw)
    assert len(full) > 100
    for end in range(len(raw)):
        assert full.startswith(sent_for(fmt, raw[:end])), raw[:end]


def sent_for(fmt: str, text: str) -> str:
    events = events_of(fmt, [text], ended=False)
    return "".join(event.text for event in events if isinstance(event, ToolCallArguments))


@pytest.mark.parametrize(
    ("opened", "arguments"),
    [('{"where": {', {"where": {}}), ('{"tags": [', {"tags": []}), ('{"where": {"lat": 1, ', {"where": {"lat": 1}})],
)
def test_a_value_that_was_opened_is_not_said_again_as_text(opened: str, arguments: dict[str, object]) -> None:
    text = f'<tool_call>\n{{"name": "search", "arguments": {opened}'
    assert fold(events_of("hermes", [text], cut=True)) == Answer(calls=(("search", arguments),))
