"""Citadel beside the servers that people run today and beside the engine alone, at the same work.

    python -m benchmarks.bench_peers [--works independent,shared_prefix] [--rounds 9] [--seconds 240] [--full] [--json]
                                     [--llama-server PATH] [--without llama-cpp-python]

The contenders run at the same time and are asked in turn, round after round, in an order that changes with each round;
an idle one takes no CPU. A ratio is that of the medians over the rounds, with a 95 % bootstrap interval over rounds;
a target is met when the interval reaches it. All rounds are kept. Everything is greedy and of a stated length.

llama.cpp has 2 threads and nothing is pinned. For vLLM its EngineCore has one core, and the server and the client
share the other; AsyncLLM alone, which has no client, has that other core to itself. What serves which work, and what
is set where, stands in benchmarks/servers.py.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Protocol

from benchmarks import report, servers, works
from benchmarks.bare import Bare, bare
from benchmarks.client import BUSY, Client, Run, ceiling
from benchmarks.measure import failures, percentile, ratio_of_medians, tokens_per_second

Figures = dict[str, float]
CITADEL: Final = "citadel"
LLAMA_SERVER, LLAMA_CPP_PYTHON = "llama-server", "llama-cpp-python"
ASYNCLLM, VLLM = "AsyncLLM alone", "vllm"
CONVERSATIONS, TURNS, SLOTS = 12, 5, 4


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    def ask(
        self, bodies: Sequence[Mapping[str, Any]], streams: int | None, at: Sequence[float] | None = None
    ) -> Run: ...

    def cpu_s(self) -> float: ...

    def pin(self, server: set[int], engine: set[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    server: servers.Server
    client: Client

    @property
    def name(self) -> str:
        return self.server.name

    def ask(self, bodies: Sequence[Mapping[str, Any]], streams: int | None, at: Sequence[float] | None = None) -> Run:
        run = self.client.run(self.server.target, bodies, streams=streams, at=at)
        if (failed := failures(run.answers)) or run.busy > BUSY:
            raise SystemExit(f"{self.name}: {dict(failed)}; the client was busy for {run.busy:.0%} of the time")
        return run

    def cpu_s(self) -> float:
        return self.server.cpu_s()

    def pin(self, server: set[int], engine: set[int]) -> None:
        self.server.pin(server, engine)


@dataclass(frozen=True, slots=True)
class Alone:
    """The engine alone is given the prompts as the tokens that `of` makes of them."""

    engine: Bare
    of: servers.Server

    @property
    def name(self) -> str:
        return self.engine.name

    def ask(self, bodies: Sequence[Mapping[str, Any]], streams: int | None, at: Sequence[float] | None = None) -> Run:
        assert streams is not None
        assert at is None
        prompts = [tokens_of(self.of, body["messages"]) for body in bodies]
        return self.engine.run(prompts, bodies[0]["max_tokens"], streams)

    def cpu_s(self) -> float:
        return self.engine.cpu_s()

    def pin(self, server: set[int], engine: set[int]) -> None:
        self.engine.pin(server, engine)


def tokens_of(server: servers.Server, messages: Any) -> list[int]:
    url = f"http://127.0.0.1:{server.target.port}/tokenize"
    headers = {**server.target.headers, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["tokens"]


# The works.


def independent(contender: Contender, seed: int) -> Figures:
    found: Figures = {}
    for streams in (1, 4) if contender.name == LLAMA_CPP_PYTHON else (1, 4, 8, 16):
        run = contender.ask(works.independent(streams, 48, seed * 100 + streams), streams)
        found[f"tok/s at {streams}"] = tokens_per_second(run.answers)
    return found


def shared_prefix(contender: Contender, seed: int) -> Figures:
    answers = contender.ask(works.shared_prefix(8, 48, seed), 8).answers
    ttft = percentile([answer.ttft for answer in answers], 0.5)
    return {"tok/s": tokens_per_second(answers), "TTFT p50 s": ttft}


def gap(contender: Contender, seed: int) -> Figures:
    """Four streams begin; when all are well under way a prompt of 1,200 tokens arrives."""
    long = works.chat(f"{seed}: {works.words(1165, seed)}", 8)
    at = 2.0
    answers = contender.ask([*works.independent(4, 160, seed), long], None, [0.0, 0.0, 0.0, 0.0, at]).answers
    streams, arrived = answers[:4], answers[4]
    gaps = [
        after - before
        for each in streams
        for before, after in zip(each.arrivals, each.arrivals[1:], strict=False)
        if after > at
    ]
    return {
        "worst gap s": max(gaps),
        "TTFT of the long prompt s": arrived.ttft,
        "prompt tokens": float(arrived.prompt_tokens),
    }


def conversations(contender: Contender, seed: int) -> Figures:
    """Each turn of the twelve is asked four at a time; what was said before is sent again, as clients do."""
    talks = [[{"role": "user", "content": f"{seed}-{at}: {works.words(60, seed + at)}"}] for at in range(CONVERSATIONS)]
    computed = total = wall = 0.0
    for turn in range(TURNS):
        run = contender.ask([works.conversation(talk, 32) for talk in talks], SLOTS)
        wall += run.wall_s
        for talk, answer in zip(talks, run.answers, strict=True):
            computed += answer.prompt_tokens - answer.cached_tokens
            total += answer.prompt_tokens
            talk.append({"role": "assistant", "content": answer.text})
            talk.append({"role": "user", "content": f"And {works.words(20, turn)}?"})
    return {"prompt tokens computed": computed, "prompt tokens": total, "s": wall}


def vllm_streams(contender: Contender, seed: int) -> Figures:
    found: Figures = {}
    for streams, tokens in ((1, 48), (8, 48), (64, 64)):
        before = contender.cpu_s()
        answers = contender.ask(works.independent(streams, tokens, seed * 100 + streams), streams).answers
        used = contender.cpu_s() - before
        found[f"tok/s at {streams}"] = tokens_per_second(answers)
        found[f"TTFT p50 s at {streams}"] = percentile([answer.ttft for answer in answers], 0.5)
        found[f"CPU us per token at {streams}"] = used / sum(each.completion_tokens for each in answers) * 1e6
    return found


@dataclass(frozen=True, slots=True)
class Aim:
    """Ours over theirs: at least `target`, or at most. With `more`, ours minus theirs instead."""

    figure: str
    against: str
    target: float
    at_most: bool = False
    more: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    measure: Callable[[Contender, int], Figures]
    contenders: tuple[str, ...]
    aims: tuple[Aim, ...]
    short: int
    """Rounds by default."""
    server: tuple[str, ...] = ("--cache-ram", "0")
    """Options of llama-server: no prompt of the works but one comes again, so the cache could only cost."""
    citadel: Mapping[str, Any] | None = None


_CONVERSATIONS: Final = Work(
    conversations,
    (CITADEL, LLAMA_SERVER),
    (Aim("prompt tokens computed", LLAMA_SERVER, 0.5, at_most=True),),
    short=1,
    server=("-np", str(SLOTS), "-c", str(SLOTS * servers.CONTEXT)),
    citadel={"slots": SLOTS},
)

WORKS: Final[dict[str, Work]] = {
    "independent": Work(
        independent,
        (CITADEL, LLAMA_SERVER, LLAMA_CPP_PYTHON),
        tuple(
            Aim(f"tok/s at {streams}", LLAMA_SERVER, target)
            for streams, target in ((1, 1.00), (4, 1.03), (8, 1.05), (16, 1.05))
        ),
        short=5,
    ),
    "shared_prefix": Work(shared_prefix, (CITADEL, LLAMA_SERVER), (Aim("tok/s", LLAMA_SERVER, 4.5),), short=3),
    "gap": Work(gap, (CITADEL, LLAMA_SERVER), (Aim("worst gap s", LLAMA_SERVER, 0.2, at_most=True),), short=3),
    "conversations": _CONVERSATIONS,
    "conversations_uncached": replace(_CONVERSATIONS, server=(*_CONVERSATIONS.server, "--cache-ram", "0")),
    "vllm": Work(
        vllm_streams,
        (CITADEL, ASYNCLLM, VLLM),
        (
            *(Aim(f"tok/s at {streams}", ASYNCLLM, 0.98) for streams in (1, 8, 64)),
            Aim("tok/s at 64", VLLM, 1.05),
            Aim("TTFT p50 s at 64", VLLM, 0.95, at_most=True),
            Aim("CPU us per token at 64", ASYNCLLM, 25, at_most=True, more=True),
            Aim("CPU us per token at 64", VLLM, 0.6, at_most=True),
        ),
        short=3,
    ),
}


def open_contenders(
    stack: ExitStack, work: Work, client: Client, options: Any
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders, warm, and their commands."""
    opened: list[Contender] = []
    ours = stack.enter_context(
        servers.citadel(
            servers.vllm_model() if VLLM in work.contenders else servers.llama_model(**(work.citadel or {}))
        )
    )
    commands = {ours.name: ours.command}
    makers: dict[str, Callable[[], Any]] = {
        LLAMA_SERVER: lambda: servers.llama_server(options.llama_server, *work.server),
        LLAMA_CPP_PYTHON: servers.llama_cpp_python,
        VLLM: servers.vllm_server,
    }
    for name in work.contenders:
        if name in options.without.split(","):
            continue
        if name == CITADEL:
            opened.append(Served(ours, client))
        elif name == ASYNCLLM:
            opened.append(Alone(stack.enter_context(bare("asyncllm")), ours))
        else:
            server = stack.enter_context(makers[name]())
            commands[name] = server.command
            opened.append(Served(server, client))
    for contender in opened:
        contender.ask(works.independent(2, 8, 99), 2)
    return opened, commands


def compare(work: Work, contenders: Sequence[Contender], rounds: int, seconds: float) -> dict[str, list[Figures]]:
    """No round begins after `seconds`."""
    found: dict[str, list[Figures]] = {contender.name: [] for contender in contenders}
    until = time.monotonic() + seconds
    for number in range(rounds):
        if time.monotonic() > until:
            break
        turn = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for contender in turn:
            found[contender.name].append(work.measure(contender, number + 1))
    return found


def judged(work: Work, rounds: Mapping[str, list[Figures]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for aim in work.aims:
        if aim.against not in rounds:
            continue
        ours, theirs = ([each[aim.figure] for each in rounds[name]] for name in (CITADEL, aim.against))
        row = {"figure": aim.figure, "against": aim.against, "citadel": median(ours), "theirs": median(theirs)}
        if aim.more:
            reached = median(ours) - median(theirs)
            met = reached <= aim.target
            said = f"{reached:.1f} more"
        else:
            ratio = ratio_of_medians(ours, theirs)
            met, said = ratio.meets(aim.target, at_most=aim.at_most), str(ratio)
        rows.append(
            {**row, "reached": said, "target": f"{'<=' if aim.at_most else '>='} {aim.target}", "met": str(met)}
        )
    return rows


def run(name: str, options: Any) -> dict[str, Any]:
    work = WORKS[name]
    rounds = options.rounds or (9 if options.full else work.short)
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        takes = ceiling(client)
        contenders, commands = open_contenders(stack, work, client, options)
        if VLLM in work.contenders:
            first, *others = sorted(os.sched_getaffinity(0))
            for contender in contenders:
                contender.pin(set(others), {first})
            servers.pin(client.pid, set(others))
        found = compare(work, contenders, rounds, options.seconds)
    medians = [
        {"who": who, **{figure: median(each[figure] for each in of) for figure in of[0]}} for who, of in found.items()
    ]
    return {
        "work": name,
        **report.context(versions=servers.versions(options.llama_server), commands=commands),
        "client_ceiling_pieces_s": round(takes),
        "medians": medians,
        "aims": judged(work, found),
        "rounds": found,
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each work, after which no round begins")
    parser.add_argument("--llama-server", help="the path of the program, where it is not on the PATH")
    parser.add_argument("--without", default="", help="contenders to leave out, by name")
    options = parser.parse_args()
    for name in options.works.split(","):
        result = run(name, options)
        if options.json:
            print(json.dumps(result, indent=1))
        else:
            report.table(f"{name}: medians of {len(result['rounds'][CITADEL])} rounds", result["medians"])
            report.table("against the targets", result["aims"])
            print(f"the client takes {result['client_ceiling_pieces_s']:,} pieces a second")
        if not options.no_save:
            report.save(f"peers-{name}", result)
            rounds = {
                figure: {
                    who: {at + 1: each[figure] for at, each in enumerate(of) if figure in each}
                    for who, of in result["rounds"].items()
                }
                for figure in dict.fromkeys(aim.figure for aim in WORKS[name].aims)
            }
            report.plot(f"peers-{name}", f"{name}, each round", rounds, "round")


if __name__ == "__main__":
    main()
