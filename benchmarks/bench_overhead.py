"""What the server itself costs: a recording is played at full rate, so nothing else takes time.

    python -m benchmarks.bench_overhead [--full] [--json]

- `pieces`: 64 streams of one event a piece. CPU of the server's process for each, and how many a core can do a second.
- `first`: one stream, whole requests: from sending to the first piece, which is what the server adds to an engine's.
- `memory`: 1,000 requests to a small model on llama.cpp; the server's RSS after each hundred. No two have a prompt in
  common, and the prompt cache may take 8 MB, which the first hundred fill: what grows after that is a leak.
- `constrained`: tokens a second with tools and a schema that holds the output, against the same prompt, tools and all,
  without the constraint (`tool_choice: none`). SmolLM2 on llama.cpp, 4 streams.
The server has one core, the client another; for the last two nothing is pinned.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import report, servers, works
from benchmarks.client import BUSY, Client, ceiling
from benchmarks.measure import failures, percentile, ratio_of_medians, tokens_per_second

STREAMS: Final = 64
PIECE: Final = "word "
TINY: Final = Path(__file__).parent.parent / "tests" / "models" / "tiny.gguf"


def replay(pieces: int, folder: Path) -> str:
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"pieces": [PIECE] * pieces}) + "\n", encoding="utf-8")
    return f'[models.recorded]\nengine = "replay"\nsource = "{script}"\nslots = {STREAMS}\n'


def split_cores(server: servers.Server, client: Client) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    server.pin({first}, {first})
    servers.pin(client.pid, set(others or [first]))


def pieces(full: bool) -> dict[str, Any]:
    count, rounds = (2000, 9) if full else (500, 3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(Client())
        server = stack.enter_context(servers.citadel(replay(count, folder)))
        split_cores(server, client)
        takes = ceiling(client)
        client.run(server.target, [works.chat("warm", 100)] * STREAMS, streams=STREAMS)
        costs, rates, busy = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            before = server.cpu_s()
            run = client.run(server.target, [works.chat("go", count)] * STREAMS, streams=STREAMS)
            assert not failures(run.answers), failures(run.answers)
            assert run.pieces == STREAMS * count
            costs.append((server.cpu_s() - before) / run.pieces * 1e6)
            rates.append(run.pieces / run.wall_s)
            busy.append(run.busy)
        one = client.run(server.target, [works.chat("one", 1)] * 200, streams=1)
        first = [answer.ttft * 1000 for answer in one.answers]
    per_core = 1e6 / median(costs)
    return {
        "aims": [_aim("pieces a second and core, 64 streams", per_core, ">= 40000", per_core >= 40_000)],
        "cpu_us_per_piece": [round(cost, 2) for cost in costs],
        "pieces_s_on_the_wall": round(median(rates)),
        "client_ceiling_pieces_s": round(takes),
        "client_busy": round(max(busy), 2),
        "first_piece_ms_p50": round(percentile(first, 0.5), 2),
        "first_piece_ms_p99": round(percentile(first, 0.99), 2),
    }


def memory(_full: bool) -> dict[str, Any]:
    model = f'[models.tiny]\nengine = "llama"\nsource = "{TINY}"\nslots = 16\nmax_parallel = 512\n'
    settings = "[models.tiny.llama]\nn_threads = 1\nprompt_cache_mb = 8\n"
    with servers.citadel(model + settings) as server, Client() as client:
        rss: list[float] = []
        for number in range(10):
            run = client.run(server.target, works.independent(100, 16, number), streams=16)
            assert not failures(run.answers), failures(run.answers)
            rss.append(round(server.rss_mb(), 1))
    grown = rss[-1] - rss[1]
    aim = _aim("MB that RSS grows from 200 to 1,000 requests", grown, "flat: <= 5", grown <= 5)
    return {"aims": [aim], "rss_mb_after_each_hundred": rss}


def constrained(full: bool) -> dict[str, Any]:
    free, held = list[float](), list[float]()
    text = "List many numbers, then a note. Answer in JSON."
    tokens, rounds = (96, 9) if full else (48, 3)
    loose = works.chat(text, tokens, tools=works.TOOLS, tool_choice="none")
    bound = works.chat(text, tokens, tools=works.TOOLS, response_format=works.SCHEMA)
    with servers.citadel(servers.llama_model()) as server, Client() as client:
        for number in range(rounds + 1):
            for body, found in ((loose, free), (bound, held)) if number % 2 else ((bound, held), (loose, free)):
                answers = client.run(server.target, [body] * 4, streams=4).answers
                assert not failures(answers), failures(answers)
                if number:  # the first is for the prompt to be known and the grammar to be made
                    found.append(tokens_per_second(answers))
    ratio = ratio_of_medians(held, free)
    return {
        "tok_s_free": [round(each, 1) for each in free],
        "tok_s_held": [round(each, 1) for each in held],
        "aims": [_aim("tok/s with tools and a schema, over without", str(ratio), ">= 0.9", ratio.meets(0.9))],
    }


def _aim(figure: str, reached: float | str, target: str, met: bool) -> dict[str, str]:
    said = reached if isinstance(reached, str) else f"{reached:,.1f}"
    return {"figure": figure, "against": "", "reached": said, "target": target, "met": str(met)}


PARTS: Final[dict[str, Callable[[bool], dict[str, Any]]]] = {
    "pieces": pieces,
    "memory": memory,
    "constrained": constrained,
}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    found = {part: PARTS[part](options.full) for part in options.parts.split(",")}
    result = {**report.context(versions=servers.versions()), **found}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for part, figures in found.items():
            report.table(part, [{"figure": name, "value": str(value)} for name, value in figures.items()])
        print(f"a client that is busy for more than {BUSY:.0%} of the time says more of itself")
    if not options.no_save:
        for part, figures in found.items():
            report.save(f"overhead-{part}", {**report.context(versions=servers.versions()), **figures})
        _plot(found)


def _plot(found: dict[str, dict[str, Any]]) -> None:
    panels: dict[str, dict[str, dict[Any, float]]] = {}
    if "pieces" in found:
        panels["CPU us a piece"] = {"citadel": dict(enumerate(found["pieces"]["cpu_us_per_piece"], 1))}
    if "memory" in found:
        panels["RSS MB by hundreds"] = {"citadel": dict(enumerate(found["memory"]["rss_mb_after_each_hundred"], 1))}
    if "constrained" in found:
        lines = {"without": "tok_s_free", "tools and schema": "tok_s_held"}
        panels["tok/s"] = {label: dict(enumerate(found["constrained"][key], 1)) for label, key in lines.items()}
    report.plot("overhead", "bench_overhead", panels, "round")


if __name__ == "__main__":
    main()
