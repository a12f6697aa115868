"""What is counted and timed, per model, for `/metrics` and for those who look at the page.

Each server has its own `CollectorRegistry`: vLLM clears its own series out of the global one whenever it starts an
engine, and must neither find ours nor leave its own here. A label's value is a configured model's id, a code of the
table of errors or a word of this file, never a caller's text.

A call is measured from outside, by the events of its answer, so nothing on the way knows of it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from citadel.errors import CitadelError
from citadel.messages import Usage

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MINUTES: Final = 60
_NOW_S: Final = 10
"""What is called the rate of now is the mean over this time."""
_FAST: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_SLOW: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900, 1800)


class Throughput:
    """Tokens of the last hour by the minute, and of the last seconds by the second; times in seconds of one clock."""

    def __init__(self) -> None:
        self._minutes: dict[int, int] = {}
        self._seconds: dict[int, int] = {}

    def add(self, now: float, tokens: int) -> None:
        second = int(now)
        if second not in self._seconds:
            self._begin(second)
        self._seconds[second] += tokens
        self._minutes[second // 60] += tokens

    def _begin(self, second: int) -> None:
        """A second of which nothing is known yet; what is too old is forgotten."""
        for counts, at, kept in ((self._seconds, second, _NOW_S + 1), (self._minutes, second // 60, MINUTES)):
            counts.setdefault(at, 0)
            for old in [each for each in counts if each <= at - kept]:
                del counts[old]

    def now(self, now: float) -> float:
        """Tokens a second over the last seconds that are over."""
        return sum(self._seconds.get(int(now) - back, 0) for back in range(1, _NOW_S + 1)) / _NOW_S

    def last_hour(self, now: float) -> list[float]:
        """Tokens a second of each minute, the oldest first; the last one is under way."""
        return [self._minutes.get(int(now / 60) - back, 0) / 60 for back in reversed(range(MINUTES))]


class Gaps(Collector):
    """The times between tokens, by model: a histogram into which a token is counted in a tenth of the time."""

    def __init__(self) -> None:
        self._of: dict[str, GapsOf] = {}

    def of(self, model: str) -> GapsOf:
        return self._of.setdefault(model, GapsOf())

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("citadel_inter_token_seconds", "Between tokens of one call", labels=["model"])
        bounds = [*(str(float(bound)) for bound in _FAST), "+Inf"]
        for model, gaps in self._of.items():
            family.add_metric([model], list(zip(bounds, accumulate(gaps.counts), strict=True)), gaps.total_s)
        yield family


class GapsOf:
    """`counts` by the bounds of `_FAST`, each of what is above the bound before it; the last of what is above all."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_FAST) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_FAST, seconds)] += 1
        self.total_s += seconds


@dataclass(frozen=True, slots=True)
class _Answers:
    """The series of one model that its tokens go to: looking one up by its labels costs more than adding to it."""

    ttft: Histogram
    gap: GapsOf
    throughput: Throughput = field(default_factory=Throughput)


@dataclass(eq=False, slots=True)
class Measured:
    """A call under way, as its events tell it."""

    model: str
    answers: _Answers
    began: float
    usage: Usage = field(default_factory=Usage)
    last_token: float | None = None


@dataclass(frozen=True, slots=True)
class ModelGauges:
    """A model at the moment of a scrape. `running` and `waiting` count calls."""

    state: str
    slots: int
    running: int
    waiting: int


class Metrics:
    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        model = ["model"]
        self._calls = Counter("citadel_calls", "Calls ended, by how", ["model", "outcome"], registry=own)
        self._errors = Counter("citadel_errors", "Requests answered with an error, by code", ["code"], registry=own)
        self._ttft = Histogram(
            "citadel_time_to_first_token_seconds", "From a call's start", model, registry=own, buckets=_SLOW
        )
        self._gaps = Gaps()
        own.register(self._gaps)
        self._wait = Histogram(
            "citadel_queue_wait_seconds", "For the model and its slots", model, registry=own, buckets=_SLOW
        )
        self._load = Histogram("citadel_load_seconds", "Loads that succeeded", model, registry=own, buckets=_SLOW)
        self._swap_in = Histogram(
            "citadel_swap_seconds", "Swaps in place that succeeded", model, registry=own, buckets=_SLOW
        )
        self._swap = Histogram(
            "citadel_unload_seconds", "From unloading to memory given back", model, registry=own, buckets=_SLOW
        )
        self._tokens = Counter("citadel_tokens", "Tokens, by kind", ["model", "kind"], registry=own)
        self._unloads = Counter("citadel_unloads", "Unloads, by cause", ["model", "cause"], registry=own)
        self._failed_loads = Counter("citadel_failed_loads", "Loads that failed", model, registry=own)
        self._restarts = Counter(
            "citadel_watchdog_restarts", "Engines that died or stalled and were closed", model, registry=own
        )
        self._state = Gauge("citadel_model_state", "1 for the state it is in", ["model", "state"], registry=own)
        self._slots = Gauge("citadel_slots", "Calls that can run at once", model, registry=own)
        self._running = Gauge("citadel_calls_running", "Calls in slots", model, registry=own)
        self._waiting = Gauge("citadel_calls_waiting", "Calls that wait for the model or a slot", model, registry=own)
        self._kv = Gauge("citadel_kv_tokens", "Tokens that running calls hold in the KV cache", model, registry=own)
        self._free = Gauge("citadel_memory_free_bytes", "What a load may take", ["memory"], registry=own)
        self._open: set[Measured] = set()
        self._since_unload: dict[str, float] = {}
        self._answers: dict[str, _Answers] = {}

    # -- one call

    @contextmanager
    def call(self, model: str) -> Generator[Measured]:
        """Around one call: its tokens and how it ended, however it ends."""
        measured, outcome = Measured(model, self._answers_of(model), time.monotonic()), "ok"
        self._open.add(measured)
        try:
            yield measured
        except CitadelError as error:
            outcome = error.row.code
            raise
        except (ConnectionError, asyncio.CancelledError):
            outcome = "client_gone"
            raise
        except BaseException:
            outcome = "internal"
            raise
        finally:
            self._open.discard(measured)
            self._calls.labels(model, outcome).inc()
            usage = measured.usage
            for kind in ("prompt", "completion", "cached", "reasoning"):
                self._tokens.labels(model, kind).inc(getattr(usage, kind))

    def saw(self, measured: Measured, usage: Usage) -> None:
        """What the call has used by now, with the next event of its answer."""
        made, measured.usage = usage.completion - measured.usage.completion, usage
        if made <= 0:
            return
        now, answers = time.monotonic(), measured.answers
        if measured.last_token is None:
            answers.ttft.observe(now - measured.began)
        else:
            answers.gap.observe((now - measured.last_token) / made)
        measured.last_token = now
        answers.throughput.add(now, made)

    @property
    def throughput(self) -> dict[str, Throughput]:
        """By the models that were ever asked."""
        return {model: answers.throughput for model, answers in self._answers.items()}

    def _answers_of(self, model: str) -> _Answers:
        if model not in self._answers:
            self._answers[model] = _Answers(self._ttft.labels(model), self._gaps.of(model))
        return self._answers[model]

    def waited(self, model: str, seconds: float) -> None:
        """A call got its slots after so long."""
        self._wait.labels(model).observe(seconds)

    def refused(self, error: CitadelError) -> None:
        """A request was answered with this error alone, whether or not it had become a call."""
        self._errors.labels(error.row.code).inc()

    # -- a model's life

    def loaded(self, model: str, seconds: float) -> None:
        self._load.labels(model).observe(seconds)

    def swapped(self, model: str, seconds: float) -> None:
        """It took over another model's engine, which is no load."""
        self._swap_in.labels(model).observe(seconds)

    def load_failed(self, model: str) -> None:
        self._failed_loads.labels(model).inc()

    def unloading(self, model: str, *, failed: bool, dismissed: bool) -> None:
        """`dismissed`: by its owner's wish; else it made room, or its idle time was up."""
        self._since_unload[model] = time.monotonic()
        self._unloads.labels(model, "failure" if failed else "owner" if dismissed else "eviction").inc()
        if failed:
            self._restarts.labels(model).inc()

    def unloaded(self, model: str) -> None:
        self._swap.labels(model).observe(time.monotonic() - self._since_unload.pop(model, time.monotonic()))

    # -- a scrape

    def render(self, models: Mapping[str, ModelGauges], free: Mapping[str, int]) -> bytes:
        """Everything in Prometheus' text format; models that are configured no more have no gauges."""
        for gauge in (self._state, self._slots, self._running, self._waiting, self._kv):
            gauge.clear()
        for model, now in models.items():
            self._state.labels(model, now.state).set(1)
            self._slots.labels(model).set(now.slots)
            self._running.labels(model).set(now.running)
            self._waiting.labels(model).set(now.waiting)
            self._kv.labels(model).set(0)
        for call in self._open:
            if call.last_token is not None and call.model in models:
                self._kv.labels(call.model).inc(call.usage.prompt + call.usage.completion)
        for memory, size in free.items():
            self._free.labels(memory).set(size)
        return generate_latest(self._registry)
