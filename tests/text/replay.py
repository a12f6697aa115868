"""The same text in every way it can be cut: each must give the answer that the whole gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

from citadel.text.formats import FORMATS, Frame, Tagged

NEAR = 12


def pieces(raw: str, cuts: list[int]) -> list[str]:
    edges = [0, *cuts, len(raw)]
    return [raw[a:b] for a, b in pairwise(edges)]


def markers(fmt: str) -> list[str]:
    found = [marker for thinking in FORMATS[fmt].thinking for marker in (thinking.open, thinking.close)]
    for frame in FORMATS[fmt].frames:
        found += [frame.open, frame.close, *(part for part in (*frame.head, *frame.tail) if isinstance(part, str))]
        found += _of_arguments(frame)
    return [marker for marker in found if marker]


def _of_arguments(frame: Frame) -> list[str]:
    if isinstance(frame.arguments, Tagged):
        return [frame.arguments.close, *(part for part in frame.arguments.header if isinstance(part, str))]
    return [frame.arguments.quote]


def one_cut(raw: str) -> Iterator[list[str]]:
    for cut in range(1, len(raw)):
        yield pieces(raw, [cut])


def two_cuts(raw: str) -> Iterator[list[str]]:
    for first in range(1, len(raw)):
        for second in range(first + 1, len(raw)):
            yield pieces(raw, [first, second])


def two_cuts_near(raw: str, fmt: str) -> Iterator[list[str]]:
    """Both cuts within 12 characters of an edge of a marker."""
    edges: set[int] = set()
    for marker in markers(fmt):
        at = raw.find(marker)
        while at >= 0:
            edges.update((at, at + len(marker)))
            at = raw.find(marker, at + 1)
    wanted = {
        pair
        for edge in edges
        for pair in combinations(range(max(1, edge - NEAR), min(edge + NEAR, len(raw) - 1) + 1), 2)
    }
    for first, second in sorted(wanted):
        yield pieces(raw, [first, second])


def random_cuts(raw: str, number: int = 200) -> Iterator[list[str]]:
    chance = random.Random(raw)
    for _ in range(number):
        most = chance.choice((2, 3, 4, 6, max(2, len(raw) // 4)))
        yield pieces(raw, sorted(chance.sample(range(1, len(raw)), min(most, len(raw) - 1))) if len(raw) > 1 else [])
