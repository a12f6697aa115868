"""What the benchmarks reckon with, and how: plain functions over plain data, nothing here runs anything.

Definitions are the field's. TTFT: from the moment a request was meant to be sent to its first piece, so a client that
falls behind can't hide it. TPOT: the time after the first piece, over the tokens after the first. ITL: the gaps between
pieces. Goodput: requests a second that kept both bounds of `Bounds`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RESAMPLES: Final = 10_000
LEAST_FOR_P99: Final = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it, in seconds from the beginning of the run.

    `arrivals` has the time of each piece that said something. `error` is what came in place of a whole answer.
    """

    intended: float
    sent: float
    arrivals: tuple[float, ...]
    ended: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.intended

    @property
    def tpot(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to count for goodput, in seconds."""

    ttft: float = 2.0
    tpot: float = 0.2


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours over theirs, with the interval that holds it in 95 of 100 repetitions."""

    value: float
    low: float
    high: float

    def meets(self, target: float, *, at_most: bool = False) -> bool:
        """The interval reaches the target."""
        return self.low <= target if at_most else self.high >= target

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Ratio:
    """Both hold a figure for each round; a round's two were taken one after the other, so they are drawn together."""
    rounds = list(zip(ours, theirs, strict=True))
    dice = random.Random(seed)

    def ratio(of: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in of) / statistics.median(b for _, b in of)

    drawn = sorted(ratio(dice.choices(rounds, k=len(rounds))) for _ in range(resamples))
    return Ratio(ratio(rounds), percentile(drawn, 0.025), percentile(drawn, 0.975))


def percentile(values: Sequence[float], fraction: float) -> float:
    """Between the two nearest, in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * fraction
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def poisson_arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """When `count` requests are to be sent that come at random, `rate` a second on average."""
    dice, now, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        now += dice.expovariate(rate)
        times.append(now)
    return times


def span(answers: Sequence[Answer]) -> float:
    """Seconds from the first that was meant to be sent to the last piece."""
    return max(answer.ended for answer in answers) - min(answer.intended for answer in answers)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    return sum(answer.completion_tokens for answer in answers) / span(answers)


def summary(answers: Sequence[Answer], bounds: Bounds) -> dict[str, float]:
    """Times in milliseconds. Failures stand beside what succeeded: a server that turns work away looks fast."""
    whole = [answer for answer in answers if answer.error is None and answer.arrivals]
    found: dict[str, float] = {"requests": len(answers), "failed": len(answers) - len(whole)}
    if not whole:
        return found
    ttft, tpot = [answer.ttft for answer in whole], [answer.tpot for answer in whole]
    gaps = [gap for answer in whole for gap in answer.gaps] or [0.0]
    good = sum(answer.ttft <= bounds.ttft and answer.tpot <= bounds.tpot for answer in whole)
    found |= {
        "tok_s": tokens_per_second(whole),
        "goodput": good / span(answers),
        "ttft_p50": percentile(ttft, 0.5) * 1000,
        "ttft_p90": percentile(ttft, 0.9) * 1000,
        "tpot_p50": percentile(tpot, 0.5) * 1000,
        "itl_p50": percentile(gaps, 0.5) * 1000,
        "itl_max": max(gaps) * 1000,
    }
    if len(whole) >= LEAST_FOR_P99:
        found["ttft_p99"] = percentile(ttft, 0.99) * 1000
    if len(gaps) >= LEAST_FOR_P99:
        found["itl_p99"] = percentile(gaps, 0.99) * 1000
    return found


def failures(answers: Sequence[Answer]) -> Counter[str]:
    return Counter(answer.error for answer in answers if answer.error is not None)
