"""How the GPU queue shares one box, beside two plain policies: arrival traces replayed in simulated time.

    python benchmarks/sim_queue.py [--json] [--seeds 10] [--residency 0,15,30] [--max-wait 300]

**ours** is `citadel.runtime.gpu_queue.decide` itself, on the registry's rules without engines, with the configured
`min_residency_s` and `max_wait_s` (or each of `--residency`). **first-come** serves every request in the order of
arrival and swaps whenever the next one wants another model; nobody is served ahead. **greedy** serves all there is for
the loaded models, media jobs counting as one, and then swaps to the longest queue.

Loads take 20 s, unloads 2 s; a model decodes up to 8 calls at once, each in its own time. Per trace and policy, as the
mean over the seeds: swaps (loads of a model), the mean and the 95th percentile of the wait before a call or job begins,
and Jain's index over the members' mean waits: 1 when all wait alike, 1/members when one waits and nobody else does. It
is taken over waits, not slowdowns: a slowdown divides by how long the answer is, which no queue can help, and would
call it unfair that a short question waits for the same swap as a long one. A policy is on the front of a trace unless
another is at least as good in all four figures and better in one. The longest wait is told beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.queue_policies import GB, FirstCome, Greedy, Ours, Policy, Request, Script, Simulation  # noqa: E402
from citadel.config import Gpu  # noqa: E402

Trace = Callable[[random.Random], list[Script]]


# -- the traces


def chat(random_: random.Random, member: str, model: str, mean_s: float = 6.0) -> Request:
    """Answers are of very different lengths: lognormal, from one second to a minute."""
    return Request(member, model, None, min(max(random_.lognormvariate(0.0, 0.8) * mean_s / 1.38, 1.0), 60.0))


def once(at: float, request: Request) -> Script:
    return Script(at, [(0.0, request)])


def stream(random_: random.Random, every_s: float, until: float, make: Callable[[], Request]) -> list[Script]:
    """Requests that come by themselves, however long the earlier ones wait."""
    times: list[float] = []
    at = random_.expovariate(1 / every_s)
    while at < until:
        times.append(at)
        at += random_.expovariate(1 / every_s)
    return [once(at, make()) for at in times]


def agents(longest_pause_s: float) -> Trace:
    """Four agents that alternate A B A C, each from another place of it; tools run between two requests."""

    def trace(random_: random.Random) -> list[Script]:
        def steps(member: str, models: str) -> list[tuple[float, Request]]:
            return [(random_.uniform(1, longest_pause_s), chat(random_, member, model)) for model in models * 12]

        phases = {"ann": "ABAC", "bob": "BACA", "eve": "ACAB", "joe": "CABA"}
        return [Script(random_.uniform(0, 30), steps(*phase)) for phase in phases.items()]

    return trace


def burst(random_: random.Random) -> list[Script]:
    """Quiet use of A, then sixty requests for three models within ten seconds, then quiet again."""
    members = ("ann", "bob", "eve", "joe")
    quiet = stream(random_, 30, 1200, lambda: chat(random_, random_.choice(members), "A"))
    many = [(random_.uniform(300, 310), random_.choice(members), random_.choice("AABC")) for _ in range(60)]
    return quiet + [once(at, chat(random_, member, model)) for at, member, model in many]


def media(random_: random.Random) -> list[Script]:
    """Chats on A and B; between them images that want the whole GPU, and music that states 20 GB."""
    chats = stream(random_, 15, 2400, lambda: chat(random_, random_.choice(("ann", "bob")), random_.choice("AAAB")))
    images = stream(random_, 300, 2400, lambda: Request("eve", None, None, random_.uniform(20, 60)))
    music = stream(random_, 240, 2400, lambda: Request("joe", None, 20 * GB, random_.uniform(20, 60)))
    return chats + images + music


def heavy_and_light(random_: random.Random) -> list[Script]:
    """One member keeps A busy all the time; another asks B something every two minutes."""
    heavy = stream(random_, 2, 2400, lambda: chat(random_, "heavy", "A", 8))
    return heavy + stream(random_, 120, 2400, lambda: chat(random_, "light", "B"))


def steady_mix(random_: random.Random) -> list[Script]:
    """Six members, each with a model of choice, on models of which some fit side by side."""
    favourites = {"ann": "AAAD", "bob": "AADE", "eve": "BBBD", "joe": "DDDE", "kim": "CAAA", "lee": "EEEA"}
    scripts: list[Script] = []
    for member, models in favourites.items():
        scripts += stream(random_, 60, 2400, lambda m=member, f=models: chat(random_, m, random_.choice(f)))
    return scripts


TRACES: dict[str, Trace] = {
    "agents, quick tools": agents(5),
    "agents, slow tools": agents(60),
    "burst": burst,
    "media jobs": media,
    "heavy and light": heavy_and_light,
    "steady mix": steady_mix,
}


# -- what comes out


@dataclass(frozen=True)
class Outcome:
    """`fairness` is the only one of which more is better."""

    swaps: float
    mean_s: float
    p95_s: float
    fairness: float
    longest_s: float

    def beats(self, other: Outcome) -> bool:
        mine = (self.swaps, self.mean_s, self.p95_s, -self.fairness)
        theirs = (other.swaps, other.mean_s, other.p95_s, -other.fairness)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


PolicyOf = Callable[[Simulation], Policy]
Results = dict[str, dict[str, Outcome]]
PLAIN: dict[str, PolicyOf] = {"first-come": FirstCome, "greedy": Greedy}


def jain(figures: Sequence[float]) -> float:
    return sum(figures) ** 2 / (len(figures) * sum(x * x for x in figures)) if any(figures) else 1.0


def replay(trace: Trace, policy_of: PolicyOf, seed: int) -> Outcome:
    scripts = trace(random.Random(seed))
    simulation = Simulation(scripts, policy_of)
    simulation.run()
    assert len(simulation.served) == sum(len(script.steps) for script in scripts), "somebody was never served"
    waits = sorted(request.began_at - request.asked_at for request in simulation.served)
    of_member: dict[str, list[float]] = {}
    for request in simulation.served:
        of_member.setdefault(request.member, []).append(request.began_at - request.asked_at)
    return Outcome(
        simulation.policy.loads,
        statistics.fmean(waits),
        waits[int(0.95 * len(waits))],
        jain([statistics.fmean(each) for each in of_member.values()]),
        waits[-1],
    )


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    rows = [(o.swaps, o.mean_s, o.p95_s, o.fairness, o.longest_s) for o in outcomes]
    return Outcome(*(statistics.fmean(column) for column in zip(*rows, strict=True)))


def run(policies: dict[str, PolicyOf], seeds: int) -> Results:
    return {
        trace: {
            name: mean_of([replay(make, policy, seed) for seed in range(seeds)]) for name, policy in policies.items()
        }
        for trace, make in TRACES.items()
    }


def ours(min_residency_s: float, max_wait_s: float) -> PolicyOf:
    return lambda simulation: Ours(simulation, min_residency_s, max_wait_s)


def main() -> None:
    arguments = argparse.ArgumentParser(description="The GPU queue beside two plain policies, in simulated time.")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--seeds", type=int, default=10)
    arguments.add_argument("--residency", default=str(Gpu().min_residency_s), help="seconds, several with commas")
    arguments.add_argument("--max-wait", type=float, default=Gpu().max_wait_s)
    options = arguments.parse_args()
    settings = [float(text) for text in options.residency.split(",")]
    policies = {f"ours, residency {seconds:g} s": ours(seconds, options.max_wait) for seconds in settings}
    results = run({**policies, **PLAIN}, options.seeds)
    print(json.dumps(as_json(results), indent=1) if options.json else as_table(results))


def on_front(outcomes: dict[str, Outcome], name: str) -> bool:
    """Each of ours is held against the plain policies, not against its own other settings."""
    others = [outcomes[each] for each in outcomes if each in PLAIN or name in PLAIN]
    return not any(each.beats(outcomes[name]) for each in others)


def as_table(results: Results) -> str:
    lines = [
        "| trace | policy | swaps | mean wait | p95 | longest | Jain | front |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for trace, outcomes in results.items():
        for name, o in outcomes.items():
            front = "yes" if on_front(outcomes, name) else "no"
            figures = f"{o.swaps:.1f} | {o.mean_s:.1f} s | {o.p95_s:.1f} s | {o.longest_s:.0f} s | {o.fairness:.4f}"
            lines.append(f"| {trace} | {name} | {figures} | {front} |")
    return "\n".join(lines)


def as_json(results: Results) -> dict[str, dict[str, dict[str, float | bool]]]:
    return {
        trace: {name: {**asdict(o), "front": on_front(outcomes, name)} for name, o in outcomes.items()}
        for trace, outcomes in results.items()
    }


if __name__ == "__main__":
    main()
