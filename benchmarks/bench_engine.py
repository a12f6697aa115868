"""The engines alone, without a server: tokens a second, and what a token costs their own process.

    python -m benchmarks.bench_engine [--engines llama,hyperqwen,asyncllm] [--streams 1,8,16] [--full] [--json]

`llama` and `hyperqwen` are Citadel's adapters, asked through the port; `asyncllm` is vLLM's AsyncLLM with a bare
consumer, started as the adapter starts it. For vLLM the engine's process has one core and ours another. Greedy.
"""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks import report, servers, works
from benchmarks.bare import KINDS, bare
from benchmarks.measure import percentile, tokens_per_second
from engines import adapter


def prompts(count: int, seed: int) -> list[list[int]]:
    """What the server would make of the same requests."""
    tokenizer = adapter("hyperqwen").open_tokenizer(servers.vllm_plan()[0])
    texts = (body["messages"][0]["content"] for body in works.independent(count, 1, seed))
    framed = (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts)
    return [tokenizer.encode(text) for text in framed]


def measure(kind: str, streams: list[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with bare(kind) as engine:
        engine.run(prompts(1, 999), 8, 1)
        if kind != "llama":
            first, *others = sorted(os.sched_getaffinity(0))
            engine.pin(set(others), {first})
        for count in streams:
            for number in range(rounds):
                before = engine.cpu_s()
                run = engine.run(prompts(count, count * 10 + number), tokens, count)
                used = engine.cpu_s() - before
                made = sum(answer.completion_tokens for answer in run.answers)
                rows.append(
                    {
                        "engine": engine.name,
                        "streams": count,
                        "tok_s": round(tokens_per_second(run.answers), 1),
                        "ttft_p50": round(percentile([answer.ttft for answer in run.answers], 0.5) * 1000, 1),
                        "cpu_us_per_token": round(used / made * 1e6, 1),
                    }
                )
    return rows


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--engines", default=",".join(KINDS))
    parser.add_argument("--streams", default="1,8,16")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    streams, rows = [int(each) for each in options.streams.split(",")], list[dict[str, Any]]()
    for kind in options.engines.split(","):
        rows += measure(kind, streams, options.tokens, 5 if options.full else 1)
    result = {**report.context(versions=servers.versions()), "rows": rows}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        report.table("the engines alone; for llama the CPU is that of the decoding, too", rows)
    if not options.no_save:
        report.save("engine", result)
        panels = {
            label: {
                who: {each["streams"]: each[name] for each in rows if each["engine"] == who}
                for who in dict.fromkeys(each["engine"] for each in rows)
            }
            for label, name in (("tok/s", "tok_s"), ("TTFT p50 ms", "ttft_p50"))
        }
        report.plot("engine", "bench_engine", panels, "streams")


if __name__ == "__main__":
    main()
