"""Every case of every format, in every way its text can be cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.text import replay
from tests.text.harness import Case, check_stream, events_of, fold
from tests.text.tables import CASES

PARAMS = [pytest.param(fmt, case, id=f"{fmt}-{case.name}") for fmt, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("fmt", CASES)
def test_each_format_has_its_share_of_cases(fmt: str) -> None:
    names = [case.name for case in CASES[fmt]]
    assert len(names) >= 25
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("fmt", "case"), PARAMS)
def test_the_whole_text_gives_the_answer(fmt: str, case: Case) -> None:
    for pieces in ([case.raw], list(case.raw)):
        events = events_of(fmt, pieces, tools=case.tools, thinking=case.thinking, cut=case.cut)
        check_stream(events, case.raw)
        assert fold(events) == case.want


@pytest.mark.parametrize(("fmt", "case"), PARAMS)
def test_cuts_make_no_difference(fmt: str, case: Case) -> None:
    same_under(fmt, case, replay.one_cut(case.raw))
    same_under(fmt, case, replay.two_cuts_near(case.raw, fmt))
    same_under(fmt, case, replay.random_cuts(case.raw, 200))


@pytest.mark.all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fmt", CASES)
def test_no_two_cuts_make_a_difference(fmt: str) -> None:
    for case in CASES[fmt]:
        same_under(fmt, case, replay.two_cuts(case.raw))
        same_under(fmt, case, replay.random_cuts(case.raw, 200))


def same_under(fmt: str, case: Case, ways: Iterable[list[str]]) -> None:
    for pieces in ways:
        got = fold(events_of(fmt, pieces, tools=case.tools, thinking=case.thinking, cut=case.cut))
        assert got == case.want, pieces
