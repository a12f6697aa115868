"""`citadel bench`: how fast a running server answers here and now; seconds, not a study."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from citadel.commands.client import Client, Refused, ask
from citadel.commands.common import FAILED


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: seconds from its sending to the first token and to the end; its tokens as the server counted."""

    first_s: float
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """`ttft_ms` is the time to the first token, `tokens_per_s` is of one stream after it, `throughput` of all together.

    The medians and 95th percentiles are of the requests that were answered.
    """

    model: str
    requests: int
    failed: int
    parallel: int
    tokens: int
    seconds: float
    ttft_ms_median: float | None
    ttft_ms_p95: float | None
    tokens_per_s_median: float | None
    throughput: float


def figures(model: str, samples: Sequence[Sample], requests: int, parallel: int, seconds: float) -> Figures:
    first = [sample.first_s * 1000 for sample in samples]
    after = [(each.tokens - 1) / (each.total_s - each.first_s) for each in samples if each.total_s > each.first_s]
    tokens = sum(sample.tokens for sample in samples)
    return Figures(
        model=model,
        requests=requests,
        failed=requests - len(samples),
        parallel=parallel,
        tokens=tokens,
        seconds=round(seconds, 3),
        ttft_ms_median=_at(first, 0.5),
        ttft_ms_p95=_at(first, 0.95),
        tokens_per_s_median=_at(after, 0.5),
        throughput=round(tokens / seconds, 1) if seconds else 0.0,
    )


def _at(values: Sequence[float], fraction: float) -> float | None:
    """The least value that at least `fraction` of all are not above."""
    return round(sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)], 1) if values else None


def run(options: argparse.Namespace) -> int:
    return ask(options, lambda client: _run(client, options))


async def _run(client: Client, options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    samples, problems = list[Sample](), list[str]()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("loading the model", total=options.requests)
        model, _ = await _request(client, options, 0, most=1)  # so that its load is in no figure
        bar.update(task, description=model)
        numbers = iter(range(1, options.requests + 1))

        async def caller() -> None:
            for number in numbers:
                try:
                    samples.append((await _request(client, options, number, most=options.max_tokens))[1])
                except Refused as refused:
                    problems.append(str(refused))
                bar.advance(task)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(options.parallel)))
        seconds = time.perf_counter() - began
    found = figures(model, samples, options.requests, options.parallel, seconds)
    _print(found, as_json=options.json)
    for problem in dict.fromkeys(problems):
        console.print(problem, markup=False)
    return FAILED if problems else 0


async def _request(client: Client, options: argparse.Namespace, number: int, most: int) -> tuple[str, Sample]:
    """The model's name as the server has it, and the measure. Each prompt is new from its first word on."""
    words = f"{number} {time.time_ns()} " + "Tell me a long story about a castle. " * max(1, options.prompt_tokens // 9)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": most,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.model is not None:
        body["model"] = options.model
    model, tokens, first, began = "", 0, 0.0, time.perf_counter()
    async with aclosing(client.events("POST", "/v1/chat/completions", body)) as events:
        async for event in events:
            chunk = event.data or {}
            model = chunk.get("model") or model
            if usage := chunk.get("usage"):
                tokens = int(usage["completion_tokens"])
            if not first and any(_said(choice["delta"]) for choice in chunk.get("choices", ())):
                first = time.perf_counter() - began
    total = time.perf_counter() - began
    return model, Sample(first or total, total, tokens)


def _said(delta: dict[str, Any]) -> bool:
    return bool(delta.get("content") or delta.get("reasoning") or delta.get("tool_calls"))


def _print(found: Figures, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    print(f"{found.model}: {found.requests} requests, {found.parallel} at once, {found.failed} failed")
    print(f"  {found.tokens} tokens in {found.seconds:.1f} s: {found.throughput} tokens/s over all")
    if found.ttft_ms_median is not None:
        print(f"  first token after {found.ttft_ms_median} ms (median), {found.ttft_ms_p95} ms (95th percentile)")
    if found.tokens_per_s_median is not None:
        print(f"  then {found.tokens_per_s_median} tokens/s for each request (median)")
