"""How long a model that is not loaded takes to its first token: cold, restarted for another one, swapped in place.

- cold: a server that has never answered is asked for a model, on llama.cpp and on vLLM; beside it a bare script that
  imports, loads and makes one token, from its start (`first_token.py`). At most 50 ms more than the script, or 1.05 of
  it, are asked for. For vLLM there are two scripts: one on AsyncLLM, which has an engine in a process of its own, as
  Citadel has; and one on LLM, all in one process, so that vLLM is imported only once. llama.cpp is asked for twice:
  `at once`, when the server has just said that it listens, and of another server that has come to rest since, which by
  then has imported llama.cpp's library; `again` is after an unload.
- in place: two checkpoints of one architecture on vLLM, and memory for one. Each request is for the other one.
- restart: the same, but one of the two has other settings, so that vLLM must be restarted. A swap in place is to be 20
  times faster than that.

The model is SmolLM2-135M; the second checkpoint is made of it by putting its layers in reverse order. Times are from
sending a streamed, greedy request to its first token, and medians of the rounds. Servers and scripts find their modules
compiled, as they are once installed; a round of llama.cpp before the first does that. All rounds are in the JSON.

    python -m benchmarks.bench_swap [--parts llama,vllm,swaps] [--rounds 3] [--cold-rounds 3] [--json]

Writes a plot and the JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from benchmarks import report, servers
from benchmarks.servers import CHECKPOINTS, CONTEXT, vllm_plan
from engines.gguf_weights import ensure_checkpoint
from tests.models.checkpoints import make, reordered
from tests.models.served import SMOLLM2_LLAMA, models_toml, smollm2_gguf
from tests.process import ROOT, Process

SLOTS: Final = 8
GPU: Final = {"ram_limit_gb": 3.0}
"""Room for one model on vLLM, and for the one on llama.cpp."""
PROMPT: Final = "Say hello in five words."
BARE_VLLM: Final = ("asyncllm", "llm")
"""The bare scripts beside it."""
LLAMA: Final = ("at once", "cold", "again")
PARTS: Final = ("llama", "vllm", "swaps")


# -- bare scripts


def bare(kind: str, model: Path) -> float:
    """Seconds from its start to its first token. vLLM gets the arguments and the environment of the adapter."""
    given, prompt, environment = str(model), PROMPT, dict(os.environ)
    if kind != "llama":
        _spec, _checkpoint, plan = vllm_plan(SLOTS)
        given = json.dumps(dict(plan.arguments))
        prompt = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        environment |= plan.environment
    command = [sys.executable, "benchmarks/first_token.py", kind, given, prompt]
    environment["PYTHONPATH"] = str(ROOT)
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as script:
        assert script.stdout is not None
        while (line := script.stdout.readline()) != "token\n":
            assert line, "the script ended without a token"
        took = time.perf_counter() - began
        script.stdout.read()
    return took


# -- the server


class Server:
    def __init__(self, session: aiohttp.ClientSession, pid: int) -> None:
        self._session = session
        self._process = psutil.Process(pid)

    def rss_mb(self) -> float:
        """Of the server and its engines."""
        processes = [self._process, *self._process.children(recursive=True)]
        return round(sum(process.memory_info().rss for process in processes) / 1e6, 1)

    async def rest(self) -> None:
        """Until it has used no processor for a third of a second."""
        before = None
        while (used := self._process.cpu_times()[:2]) != before:
            before = used
            await asyncio.sleep(0.33)

    async def unload(self, model: str) -> None:
        async with self._session.post(f"/admin/models/{model}/unload") as response:
            response.raise_for_status()
        while await self._state(model) != "stopped":  # noqa: ASYNC110 - nobody is told when it is
            await asyncio.sleep(0.02)

    async def _state(self, model: str) -> str:
        async with self._session.get("/admin/models") as response:
            return next(each["state"] for each in (await response.json())["models"] if each["id"] == model)

    async def first_token(self, model: str) -> float:
        """Seconds from sending the request; it is read to its end."""
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": True, "temperature": 0}
        began, first = time.perf_counter(), None
        async with self._session.post("/v1/chat/completions", json=body | {"max_tokens": 2}) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                if first is None and any(choice["delta"].get("content") for choice in event["choices"]):
                    first = time.perf_counter() - began
        assert first is not None
        return first

    async def swaps(self) -> int:
        """How many have been made in place."""
        async with self._session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(int(float(line.split()[1])) for line in lines if line.startswith("citadel_swap_seconds_count"))


@asynccontextmanager
async def server(models: Mapping[str, Any]) -> AsyncGenerator[Server]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = models_toml(models, server={"cache_dir": str(CHECKPOINTS)}, gpu=GPU)
        (folder / "models.toml").write_text(text, encoding="utf-8")
        process = Process(folder)
        said = process.announcement()
        headers = {"Authorization": f"Bearer {said.key}"}
        timeout = aiohttp.ClientTimeout(total=300)
        try:
            async with aiohttp.ClientSession(said.url, headers=headers, timeout=timeout) as session:
                yield Server(session, process.process.pid)
        finally:
            process.stop()


def vllm_model(source: Path, slots: int = SLOTS) -> dict[str, Any]:
    return {"engine": "hyperqwen", "source": str(source), "slots": slots, "context_length": CONTEXT}


async def cold_llama(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"llama, bare": [], **{f"llama, {when}": [] for when in LLAMA}}
    models = {"llama": {**SMOLLM2_LLAMA, "slots": 1, "context_length": CONTEXT}}
    for _ in range(rounds + 1):
        times["llama, bare"].append(await asyncio.to_thread(bare, "llama", smollm2_gguf()))
        async with server(models) as started:
            times["llama, at once"].append(await started.first_token("llama"))
        async with server(models) as started:
            await started.rest()
            times["llama, cold"].append(await started.first_token("llama"))
            await started.unload("llama")
            times["llama, again"].append(await started.first_token("llama"))
    return {name: found[1:] for name, found in times.items()}


async def cold_vllm(checkpoint: Path, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for script in BARE_VLLM:
            times.setdefault(f"{script}, bare", []).append(await asyncio.to_thread(bare, script, checkpoint))
        async with server({"vllm": vllm_model(checkpoint)}) as started:
            times.setdefault("vllm, cold", []).append(await started.first_token("vllm"))
    return times


async def swaps(checkpoint: Path, other: Path, rounds: int) -> dict[str, list[float]]:
    """Each checkpoint is loaded once before, since only what was loaded here before is swapped in place."""
    times: dict[str, list[float]] = {"in place": [], "restart": []}
    models = {"one": vllm_model(checkpoint), "other": vllm_model(other), "odd": vllm_model(other, SLOTS + 1)}
    async with server(models) as started:
        for model in ("other", "one"):
            await started.first_token(model)
        for _ in range(rounds):
            before = await started.swaps()
            memory = started.rss_mb()
            times["in place"] += [await started.first_token(model) for model in ("other", "one") * 3]
            assert await started.swaps() == before + 6, "not all of them were swaps in place"
            print(f"memory before and after six swaps: {memory}, {started.rss_mb()} MB", file=sys.stderr)
            times["restart"] += [await started.first_token(model) for model in ("odd", "one")]
            assert await started.swaps() == before + 6
    return times


# -- what came out


def rows(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    median = {name: statistics.median(all_) for name, all_ in times.items()}
    found = []
    pairs = [(f"llama, {when}", "llama") for when in LLAMA] + [("vllm, cold", script) for script in BARE_VLLM]
    for work, script in pairs:
        if work in median:
            ours, base = median[work], median[f"{script}, bare"]
            met = ours <= max(base + 0.05, base * 1.05)
            found.append(row(work, ours, f"bare {script}", base, ours / base, "+50 ms or 1.05", met))
    if times.get("in place"):
        ours, base = median["in place"], median["restart"]
        found.append(row("vllm, in place", ours, "restart", base, base / ours, "20 times faster", base >= 20 * ours))
    return found


def row(work: str, ours: float, against: str, base: float, ratio: float, target: str, met: bool) -> dict[str, Any]:
    seconds = {"seconds": round(ours, 3), "against": against, "its seconds": round(base, 3), "ratio": round(ratio, 2)}
    return {"work": work, **seconds, "target": target, "met": "yes" if met else "no"}


def show(found: Sequence[Mapping[str, Any]]) -> None:
    print(f"| {' | '.join(found[0])} |\n|{'---|' * len(found[0])}")
    for each in found:
        print(f"| {' | '.join(map(str, each.values()))} |")


def plot(file: str, times: Mapping[str, Sequence[float]]) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - a second to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axis = plt.subplots(figsize=(7, 3))
    names = list(times)
    axis.barh(names, [statistics.median(times[name]) for name in names])
    for at, name in enumerate(names):
        axis.plot(times[name], [at] * len(times[name]), "k.")
    axis.set(xscale="log", xlabel="seconds to the first token (each round a dot)")
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(report.RESULTS / f"{file}.png", dpi=80)
    plt.close(figure)


def save(name: str, result: Mapping[str, Any]) -> None:
    report.save(name, result)
    try:
        plot(name, result["times"])
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)


async def measure(parts: Sequence[str], rounds: int, cold_rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    if "llama" in parts:
        times |= await cold_llama(cold_rounds)
    if {"vllm", "swaps"} & set(parts):
        checkpoint = await asyncio.to_thread(ensure_checkpoint, smollm2_gguf(), CHECKPOINTS, lambda _done: None)
        if "vllm" in parts:
            times |= await cold_vllm(checkpoint, cold_rounds)
        if "swaps" in parts:
            with tempfile.TemporaryDirectory() as place:
                other = await asyncio.to_thread(make, Path(place) / "other", reordered, tied=True, source=checkpoint)
                times |= await swaps(checkpoint, other, rounds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each of six swaps in place and two restarts")
    parser.add_argument("--cold-rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of these, with commas between")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parts = arguments.parts.split(",")
    times = asyncio.run(measure(parts, arguments.rounds, arguments.cold_rounds))
    result = {**report.context(versions=servers.versions()), "rows": rows(times), "times": times}
    save("bench_swap" if parts == list(PARTS) else f"bench_swap-{'-'.join(parts)}", result)
    print(json.dumps(result)) if arguments.json else show(result["rows"])


if __name__ == "__main__":
    main()
