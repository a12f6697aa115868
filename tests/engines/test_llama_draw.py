"""The draw from the whole vocabulary, which no truncation comes before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from citadel.engine import Sampling
from engines.llama_sampling import PlainDraw, is_plain


def draws(logits: np.ndarray, count: int, temperature: float = 1.0, seed: int = 1) -> list[int]:
    draw = PlainDraw(Sampling(1, temperature=temperature, seed=seed))
    return [draw(logits, logits.max()) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("places", [(0, 1, 2), (0, 255, 256), (700, 998, 999)])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float, places: tuple[int, ...]):
    logits = np.full(1000, -np.inf, np.float32)
    logits[list(places)] = np.log([0.6, 0.3, 0.1])
    likely = np.array([0.6, 0.3, 0.1]) ** (1 / temperature)
    likely /= likely.sum()
    counts = Counter(draws(logits, 4000, temperature))
    assert set(counts) <= set(places), "what is forbidden is never drawn"
    for place, share in zip(places, likely, strict=True):
        assert counts[place] / 4000 == pytest.approx(share, abs=0.03)


def test_a_large_vocabulary_of_equals_is_drawn_from_evenly():
    counts = Counter(token * 8 // 49_152 for token in draws(np.zeros(49_152, np.float32), 4000))
    assert all(400 < counts[part] < 600 for part in range(8))


def test_a_seed_makes_the_draws_repeat():
    logits = np.zeros(1000, np.float32)
    assert draws(logits, 20) == draws(logits, 20)
    assert draws(logits, 20) != draws(logits, 20, seed=2)


@pytest.mark.parametrize("point", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_range_draw_tokens_that_are_allowed(point: float):
    logits = np.full(1000, -np.inf, np.float32)
    logits[[300, 600]] = [1e-3, -2.0]
    draw = PlainDraw(Sampling(1))

    class Fixed:
        def random(self) -> float:
            return float(point)

    draw._random = Fixed()  # type: ignore[assignment]
    assert draw(logits, logits.max()) == (300 if point == 0.0 else 600)


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_only_what_nothing_truncates_is_plain(truncation: dict[str, float]):
    assert is_plain(Sampling(1))
    assert not is_plain(Sampling(1, **truncation))  # type: ignore[arg-type]
