"""vLLM itself on a real model: what the contract does not ask of every engine, and what went wrong with vLLM once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from rigs import HYPERQWEN, all_of, chatml, has_vllm, hyperqwen_spec, loaded, text_of, tokens_of

from citadel.engine import EngineSpec, Job, Piece, Sampling
from citadel.errors import BadRequest, EngineRestarted, LlmUnavailable
from engines.hyperqwen import Hyperqwen
from tests.models.export import CHECKPOINT

pytestmark = [
    pytest.mark.real,
    has_vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    # vLLM's client, when its start fails, closes its sockets and leaves their context to the collector.
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),
]

MANY = 64


def spec(**options: Any) -> EngineSpec:
    return replace(hyperqwen_spec(Path(), **options), slots=MANY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncGenerator[Any]:
    async with loaded(HYPERQWEN, spec()) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Long enough together that vLLM can't compute all at once, and each different from its first tokens on."""
    tokenizer = Hyperqwen.open_tokenizer(spec())
    story = "about a fox, a crow, a stork and a frog who live in a wood by the sea and talk of the weather. " * 2
    return [tokenizer.encode(chatml(f"{number} times: tell me a story {story}")) for number in range(MANY)]


def job(name: str, prompt: list[int], grammar: str | None = None, **sampling: Any) -> Job:
    return Job(name, prompt, Sampling(**{"max_tokens": 16, "temperature": 0.0, **sampling}), grammar)


def engine_process(engine: Any) -> psutil.Process:
    return psutil.Process(engine._parts.processes.pids[0])


def more_than_fit(name: str) -> list[Job]:
    """So many prompts at once that the last ones are not handed over yet."""
    return [job(f"{name}-waits-{number}", [300 + number] * 400, ignore_eos=True) for number in range(8)]


def children() -> set[int]:
    resource_tracker.ensure_running()  # a process of Python's that stays once anything has used multiprocessing
    return {child.pid for child in psutil.Process().children(recursive=True)}


# Many at once.


async def before_the_last(engine: Any, name: str, prompts: list[list[int]]) -> list[int]:
    """Of jobs that come at once: whose pieces came before the first of the last one, by their numbers."""
    pieces: list[int] = []

    async def ask(number: int) -> None:
        async with aclosing(engine.generate(job(f"{name}-{number}", prompts[number], ignore_eos=True))) as output:
            async for _piece in output:
                pieces.append(number)  # noqa: PERF401 - at the moment when it comes

    await asyncio.gather(*(ask(number) for number in range(len(prompts))))
    return pieces[: pieces.index(len(prompts) - 1)]


async def test_those_that_run_have_tokens_between_the_prompts_of_many_that_come_at_once(engine: Any):
    before = await before_the_last(engine, "apart", [[100 + number] * 400 for number in range(8)])
    # Two of these prompts are computed in a step, and the last two wait for three.
    assert [before.count(number) >= least for number, least in ((0, 3), (2, 2), (4, 1))] == [True] * 3


async def test_prompts_that_begin_with_what_the_cache_has_do_not_wait_for_each_other(engine: Any):
    before = await before_the_last(engine, "shared", [[99] * 400 + [100 + number] for number in range(8)])
    assert max(before.count(number) for number in range(7)) <= 2  # they are in one step, or a late one in the next


async def test_many_seeded_jobs_at_once_all_answer_as_they_do_alone(engine: Any, prompts: list[list[int]]):
    def seeded(run: str, number: int) -> Job:
        return job(f"{run}-{number}", prompts[number], temperature=0.8, seed=number, ignore_eos=True)

    together = await asyncio.gather(*(all_of(engine, seeded("together", number)) for number in range(MANY)))
    assert engine.dead is None
    assert [len(tokens_of(pieces)) for pieces in together] == [16] * MANY
    alone = [tokens_of(await all_of(engine, seeded("alone", number))) for number in range(0, MANY, 8)]
    again = [tokens_of(await all_of(engine, seeded("again", number))) for number in range(0, MANY, 8)]
    assert alone == again


async def test_parallel_greedy_jobs_answer_as_they_do_alone_but_for_ties(engine: Any, prompts: list[list[int]]):
    def greedy(run: str, number: int) -> Job:
        return job(f"{run}-{number}", prompts[number], logprobs=2, ignore_eos=True)

    alone = [await all_of(engine, greedy("alone", number)) for number in range(8)]
    together = await asyncio.gather(*(all_of(engine, greedy("together", number)) for number in range(8)))
    for one, other in zip(alone, together, strict=True):
        entries = [entry for piece in one for entry in piece.logprobs]
        differing = [
            at for at, pair in enumerate(zip(tokens_of(one), tokens_of(other), strict=True)) if len({*pair}) > 1
        ]
        for at in differing[:1]:  # what follows a difference answers to another text
            first, second = (candidate.logprob for candidate in entries[at].top)
            assert first - second < 0.2, "the two were as good as equal"


@pytest.mark.parametrize("seed", [0, -1, 1 << 31, 1 << 64, -(1 << 70)])
async def test_any_integer_is_a_seed(engine: Any, prompts: list[list[int]], seed: int):
    names = (f"a{seed}", f"b{seed}", f"c{seed}")
    outputs = [await all_of(engine, job(name, prompts[0], temperature=1.0, seed=seed)) for name in names]
    assert tokens_of(outputs[1]) == tokens_of(outputs[2])


# Grammars.


async def test_a_grammar_holds_over_the_whole_output(engine: Any, prompts: list[list[int]]):
    schema = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    grammar = f'start: "answer: " %json {json.dumps(schema)}'
    pieces = await all_of(engine, job("grammar", prompts[0], grammar, temperature=1.0, max_tokens=64))
    assert text_of(pieces) in ('answer: {"n":7}', 'answer: {"n":8}')
    assert pieces[-1].finish == "stop"


async def test_a_grammar_names_special_tokens_by_id(engine: Any, prompts: list[list[int]]):
    token = prompts[0][0]
    pieces = await all_of(engine, job("token", prompts[0], f'start: "call" <[{token}]> "done"'))
    assert text_of(pieces) == "call<|im_start|>done"
    assert token in tokens_of(pieces)


@pytest.mark.parametrize("grammar", ["start: unknown", "start: %json {", "", 'start: "a'])
async def test_a_grammar_that_is_none_is_a_bad_request(engine: Any, prompts: list[list[int]], grammar: str):
    with pytest.raises(BadRequest):
        await all_of(engine, job(f"bad {grammar}", prompts[0], grammar))
    assert engine.dead is None


# Its end.


async def test_killing_the_process_ends_its_jobs_and_no_other_engine(engine: Any, prompts: list[list[int]]):
    async with loaded(HYPERQWEN, spec()) as victim:
        long = [job(f"victim-{number}", prompts[number], max_tokens=300, ignore_eos=True) for number in range(8)]
        running = [asyncio.create_task(all_of(victim, each)) for each in long]
        async with aclosing(engine.generate(job("survivor", prompts[9], max_tokens=40, ignore_eos=True))) as survivor:
            pieces: list[Piece] = [await anext(survivor)]
            async with aclosing(
                victim.generate(job("watched", prompts[8], max_tokens=300, ignore_eos=True))
            ) as watched:
                await anext(watched)
                running += [asyncio.create_task(all_of(victim, each)) for each in more_than_fit("victim")]
                await asyncio.sleep(0)
                engine_process(victim).send_signal(signal.SIGKILL)
                with pytest.raises(EngineRestarted):
                    async for _ in watched:
                        pass
            results = await asyncio.gather(*running, return_exceptions=True)
            pieces += [piece async for piece in survivor]
    assert [type(result) for result in results] == [EngineRestarted] * 16
    assert {result.fields["reason"] for result in results} == {"its process was ended by SIGKILL"}
    assert victim.dead == "its process was ended by SIGKILL"
    assert len(tokens_of(pieces)) == 40
    assert engine.dead is None


async def test_a_stopped_process_is_closed_like_any_other_and_so_after_a_cancelled_close(prompts: list[list[int]]):
    before = children()
    async with loaded(HYPERQWEN, spec()) as engine:
        running = asyncio.create_task(all_of(engine, job("stuck", prompts[0], max_tokens=300, ignore_eos=True)))
        await all_of(engine, job("first", prompts[1], max_tokens=1))
        engine_process(engine).suspend()
        waiting = [asyncio.create_task(all_of(engine, each)) for each in more_than_fit("stuck")]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await engine.close()
        results = await asyncio.gather(running, *waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineRestarted] * 9
    assert {result.fields["reason"] for result in results} == {"it was unloaded"}
    assert children() == before


# Its start.


REFUSED = {
    "a cache too small": ({"kv_cache_memory_bytes": 4 << 20}, "ValueError: To serve at least one request"),
    "a platform that lacks it": ({"distributed_executor_backend": "ray"}, "[Rr]ay"),
    "a number that does not divide": ({"tensor_parallel_size": 2}, "attention heads"),
    "a value of the wrong type": ({"enforce_eager": "perhaps"}, "refuses its configuration"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=list(REFUSED))
async def test_what_vllm_refuses_is_refused_in_its_words(options: dict[str, Any], reason: str):
    before, environment = children(), dict(os.environ)
    with pytest.raises(LlmUnavailable) as caught:
        await Hyperqwen.load(spec(**options), lambda _fraction: None)
    assert caught.match("smollm2 cannot be started")
    assert re.search(reason, caught.value.fields["reason"])
    assert children() == before
    assert dict(os.environ) == environment


async def test_a_load_cancelled_while_its_process_starts_leaves_nothing():
    before, threads = children(), threading.active_count()
    load = asyncio.create_task(Hyperqwen.load(spec(), lambda _fraction: None))
    while children() == before:  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0.05)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert children() == before
    assert threading.active_count() <= threads + 1, "the event loop's pool may have grown"


async def test_with_prompts_computed_in_parts_a_seed_is_refused_rather_than_died_of():
    """The first jobs are of one token and of a few; an interrupt, meant for the server, lets the last one finish."""
    in_parts = spec(enable_chunked_prefill=True, max_num_batched_tokens=MANY)
    async with loaded(HYPERQWEN, replace(in_parts, source=CHECKPOINT)) as engine:
        for length in (1, 3, 2 * MANY):
            assert len(tokens_of(await all_of(engine, job(f"plain-{length}", [7] * length, ignore_eos=True)))) == 16
        with pytest.raises(BadRequest, match="seed"):
            await all_of(engine, job("seeded", [7], seed=1))
        async with aclosing(engine.generate(job("last", [7], max_tokens=400, ignore_eos=True))) as pieces:
            made = [await anext(pieces)]
            engine_process(engine).send_signal(signal.SIGINT)
            made += [piece async for piece in pieces]
        assert len(tokens_of(made)) == 400


SERVER = """
import asyncio
from pathlib import Path
from rigs import hyperqwen_spec
from citadel.errors import LlmUnavailable
from engines.hyperqwen import Hyperqwen

async def main():
    try:
        await Hyperqwen.load(hyperqwen_spec(Path(), tensor_parallel_size=2), print)
    except LlmUnavailable as refused:
        print(refused.fields["reason"], flush=True)
    engine = await Hyperqwen.load(hyperqwen_spec(Path()), print)
    print("process", engine._parts.processes.pids[0], flush=True)
    await asyncio.sleep(1000)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_its_process_ends_with_a_server_that_is_killed_outright(tmp_path: Path):
    """Of the second load: vLLM runs its plugins in a server once."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(program), env=program_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert server.stdout is not None
    while not (line := await server.stdout.readline()).startswith(b"process "):
        assert line, "the server ended too soon"
    process = psutil.Process(int(line.split()[1]))
    server.kill()
    await server.wait()
    await asyncio.to_thread(process.wait, 30)


def program_environment() -> dict[str, str]:
    here = Path(__file__)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent)])}


@pytest.mark.all
async def test_five_swaps_leave_the_process_as_it_was():
    program = [sys.executable, str(Path(__file__).with_name("swaps.py")), "6"]
    said = await asyncio.to_thread(
        subprocess.run, program, env=program_environment(), capture_output=True, text=True, check=True
    )
    first, *later = map(json.loads, said.stdout.splitlines())
    assert len(later) == 5
    for name in ("files", "children"):
        assert [each[name] for each in later] == [first[name]] * 5, name
    assert "leaked" not in said.stderr, "what Python's tracker of semaphores says at exit"
    assert max(each["threads"] for each in later) <= first["threads"] + 2, "the event loop's pool may have grown"
    # The C library keeps holes: some 20 MB after ten swaps, and then no more. One tokenizer kept each time is 150.
    assert max(each["rss"] for each in later) - first["rss"] < 40e6
