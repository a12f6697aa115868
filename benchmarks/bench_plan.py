"""What the planner predicts, beside what llama.cpp then does: tokens per second warm, and from a cold file.

A mixture of experts is written (random weights, Q8_0, of 2.6 GB: more than any cache holds), and loaded by the engine
`strata` under several plans. Warm: the fastest tenth of a generation's decodes. Cold: the file's pages are dropped from
RAM, then the time from the beginning of the load to the first token, the fastest of three loads. Bandwidths are
measured first, as by `python -m citadel plan --calibrate`. The last column is what other processes used of the machine
meanwhile, in cores: a product on all cores waits for the slowest of them, so that a prediction can hold where that is
nearly nothing.

    python -m benchmarks.bench_plan [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil

from citadel.engine import Engine, EngineSpec, Job, Sampling
from engines import adapter, llama_room, plan_rates
from engines.ggml import fastest_tenth
from engines.llama_files import Weights
from engines.llama_options import settings_of
from engines.plan import Plan
from engines.plan_cost import Rates, cached, cold_s, forecast
from tests.models import moe

VOCABULARY = 4096
MODEL = moe.Moe(2048, layers=16, forward=1408, heads=16, kv_heads=4, head=128, experts=16, used=4, context=1024)
PROMPT = [5, 6, 7, 8]
TOKENS = 40
COLD_LOADS = 3
ALPHABET = [chr(0x4E00 + number) for number in range(VOCABULARY - 3)]

PLANS: dict[str, dict[str, Any]] = {
    "all in RAM": {},
    "experts of half the layers on the disk": {"place": {r"blk\.[0-3]\..*_exps": "disk"}},
    "all experts on the disk": {"place": {"_exps": "disk"}},
}


def write_model(path: Path) -> None:
    random, kind = np.random.default_rng(3), gguf.GGMLQuantizationType.Q8_0

    def matrix(writer: Any, name: str, shape: tuple[int, ...]) -> None:
        """Experts are all alike, but for the router, which is not quantized."""
        if name.endswith("ffn_gate_inp"):
            writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.3).astype(np.float32))
            return
        block = gguf.quantize((random.standard_normal(shape[-2:]) * 0.05).astype(np.float32), kind)
        data = np.ascontiguousarray(np.broadcast_to(block, (*shape[:-2], *block.shape)))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    vocabulary = moe.Vocabulary(["<a>", "<b>", "<c>", *ALPHABET], [f"{ALPHABET[0]} {ALPHABET[1]}"])
    moe.write(path, MODEL, vocabulary, matrix)
    with path.open("rb") as file:
        os.fsync(file.fileno())


@asynccontextmanager
async def loaded(spec: EngineSpec) -> AsyncIterator[Engine]:
    engine = await adapter("strata").load(spec, lambda _fraction: None)
    try:
        yield engine
    finally:
        await engine.close()


async def arrivals(engine: Engine, tokens: int) -> list[float]:
    """When each token came."""
    job = Job("bench", PROMPT, Sampling(tokens, temperature=0, ignore_eos=True))
    times: list[float] = []
    async for piece in engine.generate(job):
        times += [time.perf_counter()] * len(piece.token_ids)
    return times


async def warm(spec: EngineSpec) -> float:
    """Tokens per second of a decode, the fastest tenth's, after a generation that has touched every page it needs.

    Not the median: bandwidths too are measured at their best, and what runs beside would be in one and not the other.
    """
    async with loaded(spec) as engine:
        await arrivals(engine, TOKENS)
        times = await arrivals(engine, TOKENS)
    return 1 / fastest_tenth([after - before for before, after in itertools.pairwise(times)])


async def cold(spec: EngineSpec) -> float | None:
    """Seconds from the beginning of a load to the first token, of the fastest; None where the file stays in RAM."""
    times: list[float] = []
    for _ in range(COLD_LOADS):
        with spec.source.open("rb") as file:
            if not plan_rates.drop(file.fileno()):
                return None
        began = time.perf_counter()
        async with loaded(spec) as engine:
            times.append((await arrivals(engine, 1))[0] - began)
    print("cold:", [round(each, 2) for each in times], file=sys.stderr)
    return min(times)


class Others:
    """The cores that other processes used since this was made."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        (busy, own, at), (busy_then, own_then, then) = self._now(), self._began
        return (busy - busy_then - (own - own_then)) / (at - then)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        all_, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(all_) - all_.idle - getattr(all_, "iowait", 0.0)
        return busy, own.user + own.system, time.perf_counter()


async def row(name: str, what: str, predicted: float, measuring: Awaitable[float | None], unit: str) -> str:
    others = Others()
    measured = await measuring
    if measured is None:
        return f"| {name} | {what} | {predicted:.3g} {unit} | not run: the page cache can't be dropped | | |"
    off = f"{measured / predicted - 1:+.0%}"
    return f"| {name} | {what} | {predicted:.3g} {unit} | {measured:.3g} {unit} | {off} | {others.cores():.2f} |"


async def compare(spec: EngineSpec, name: str, rates: Rates) -> list[str]:
    plan: Plan = await asyncio.to_thread(planned, spec)
    speed = forecast(plan, cached(rates)).tokens_per_s
    return [
        await row(name, "warm", speed, warm(spec), "tokens/s"),
        await row(name, "cold", cold_s(plan, rates, len(PROMPT)), cold(spec), "s"),
    ]


def planned(spec: EngineSpec) -> Plan:
    return llama_room.plan_of(spec, settings_of(spec, "strata"), Weights(spec))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--folder", type=Path, help="where the model is written for the time of the run")
    with tempfile.TemporaryDirectory(dir=arguments.parse_args().folder) as name:
        folder = Path(name)
        adapter("strata")
        print(plan_rates.machine(), file=sys.stderr)
        others = Others()
        rates = plan_rates.measure(folder, lambda line: print(line, file=sys.stderr), kinds=("q8_0", "f32"))
        write_model(folder / "moe.gguf")
        print(f"others meanwhile: {others.cores():.2f} cores", file=sys.stderr)
        print("| plan | | predicted | measured | off by | others |\n|---|---|--:|--:|--:|--:|")
        for plan, options in PLANS.items():
            spec = EngineSpec("moe", folder / "moe.gguf", None, 1, 1024, None, folder, options)
            print("\n".join(asyncio.run(compare(spec, plan, rates))), flush=True)


if __name__ == "__main__":
    main()
