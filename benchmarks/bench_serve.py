"""The server under load, as the field measures it: TTFT, TPOT, ITL, tokens a second, goodput.

    python -m benchmarks.bench_serve [--model llama|hyperqwen] [--streams 1,4,8,16,64] [--full] [--json]

Closed loop: so many streams, each of which asks again when it is answered. Open loop: requests come at random (Poisson)
at 50, 70 and 90 % of the capacity that the closed loop found, each timed from the moment when it was meant to be sent,
so what waits in front of a busy server counts. Prompts have about 60 tokens; goodput counts requests whose first token
came within 2 s and whose further ones took 0.2 s each at most. Greedy.
"""

from __future__ import annotations

import json
from typing import Any, Final

from benchmarks import report, servers, works
from benchmarks.client import BUSY, Client, Run, ceiling
from benchmarks.measure import Bounds, failures, poisson_arrivals, summary

RATES: Final = (0.5, 0.7, 0.9)
BOUNDS: Final = Bounds()


def row(load: str, run: Run) -> dict[str, Any]:
    said = {name: round(value, 2) for name, value in summary(run.answers, BOUNDS).items()}
    return {"load": load, **said, "client busy": round(run.busy, 2)}


def measure(
    server: servers.Server, client: Client, streams: list[int], tokens: int, full: bool
) -> list[dict[str, Any]]:
    client.run(server.target, works.independent(1, 8, 0), streams=1)
    rows: list[dict[str, Any]] = []
    capacity = 0.0
    for count in streams:
        bodies = works.independent(count * (4 if full else 2), tokens, count)
        run = client.run(server.target, bodies, streams=count)
        rows.append(row(f"closed, {count} streams", run))
        capacity = max(capacity, len(bodies) / run.wall_s)
        if failed := failures(run.answers):
            print(f"{count} streams: {dict(failed)}")
    for share in RATES:
        count = 200 if full else 24
        times = poisson_arrivals(capacity * share, count, seed=round(share * 10))
        run = client.run(server.target, works.independent(count, tokens, 1000 + round(share * 10)), at=times)
        rows.append(row(f"open, {share:.0%} of {capacity:.2f}/s", run))
    return rows


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--model", choices=("llama", "hyperqwen"), default="llama")
    parser.add_argument("--streams", default="1,4,8,16,64")
    parser.add_argument("--tokens", type=int, help="of each answer; 24 by default, with --full 64")
    options = parser.parse_args()
    tokens = options.tokens or (64 if options.full else 24)
    models = servers.llama_model() if options.model == "llama" else servers.vllm_model()
    with servers.citadel(models) as server, Client() as client:
        takes = ceiling(client)
        rows = measure(server, client, [int(each) for each in options.streams.split(",")], tokens, options.full)
    result = {
        "model": options.model,
        "tokens": tokens,
        **report.context(versions=servers.versions(), commands={server.name: server.command}),
        "client_ceiling_pieces_s": round(takes),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        report.table(f"{options.model}, {tokens} tokens an answer; times in ms", rows)
        busiest = max(each["client busy"] for each in rows)
        print(
            f"the client takes {takes:,.0f} pieces a second; it was busy for {busiest:.0%} at most, {BUSY:.0%} is much"
        )
    if not options.no_save:
        report.save(f"serve-{options.model}", result)
        panels = {
            label: {"citadel": {each["load"].removeprefix("closed, "): each[name] for each in rows if name in each}}
            for label, name in (("tok/s", "tok_s"), ("TTFT p50 ms", "ttft_p50"), ("TPOT p50 ms", "tpot_p50"))
        }
        report.plot(f"serve-{options.model}", f"bench_serve, {options.model}", _short(panels), "load")


def _short(panels: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Loads as short as a plot's axis needs them."""
    return {
        label: {
            who: {load.split(" ")[0 if "streams" in load else 1].removesuffix(","): y for load, y in points.items()}
            for who, points in lines.items()
        }
        for label, lines in panels.items()
    }


if __name__ == "__main__":
    main()
