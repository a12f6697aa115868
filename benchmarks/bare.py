"""An engine alone in a process, with a bare consumer: no server, no HTTP, no JSON, no text understood.

`asyncllm` is vLLM's AsyncLLM, started with the arguments and the environment that the adapter would start it with;
`hyperqwen` and `llama` are Citadel's adapters, through the port. The process takes jobs by lines of JSON, as the load
generator does, and answers with the same `Answer`s.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import uvloop

from benchmarks.client import ROOT, Run
from benchmarks.measure import Answer
from benchmarks.servers import CHECKPOINTS, CONTEXT, LLAMA_SLOTS, Measured, gguf, vllm_plan
from citadel.engine import EngineSpec, Job, Sampling

Generate = Callable[[str, Sequence[int], int], AsyncGenerator[int, None]]
"""A job's id, its prompt and how many tokens -> how many tokens came, time and again."""
KINDS: Final = ("asyncllm", "hyperqwen", "llama")


@dataclass(frozen=True)
class Bare(Measured):
    name: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def run(self, prompts: Sequence[Sequence[int]], tokens: int, streams: int) -> Run:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "streams": streams}) + "\n")
        self.process.stdin.flush()
        found = orjson.loads(self.process.stdout.readline())
        answers = [Answer(**{**each, "arrivals": tuple(each["arrivals"])}) for each in found["answers"]]
        return Run(answers, found["wall_s"], found["busy"])


@contextmanager
def bare(kind: str) -> Iterator[Bare]:
    environment = {**os.environ, **(vllm_plan()[2].environment if kind == "asyncllm" else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare", kind],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"the engine {kind} alone did not start: python -m benchmarks.bare {kind} says why")
    try:
        yield Bare({"asyncllm": "AsyncLLM alone"}.get(kind, f"{kind} alone"), process)
    finally:
        process.communicate()


def _asyncllm() -> tuple[Generate, Callable[[], Any]]:
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415 - takes seconds
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.inputs import tokens_input  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    arguments: dict[str, Any] = dict(vllm_plan()[2].arguments)
    arguments["structured_outputs_config"] = StructuredOutputsConfig(**arguments["structured_outputs_config"])
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(name: str, prompt: Sequence[int], tokens: int) -> AsyncGenerator[int, None]:
        wanted = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async with aclosing(llm.generate(tokens_input(list(prompt)), wanted, name)) as outputs:
            async for output in outputs:
                yield len(output.outputs[0].token_ids)

    return generate, lambda: llm.shutdown(timeout=0.5)


async def _adapter(kind: str) -> tuple[Generate, Callable[[], Any]]:
    from engines import adapter  # noqa: PLC0415 - only here

    if kind == "hyperqwen":
        spec = vllm_plan()[0]
    else:
        spec = EngineSpec("smollm2", gguf(), None, LLAMA_SLOTS, CONTEXT, None, CHECKPOINTS, {"n_threads": 2})
    engine = await adapter(kind).load(spec, lambda _done: None)

    async def generate(name: str, prompt: Sequence[int], tokens: int) -> AsyncGenerator[int, None]:
        job = Job(name, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        async with aclosing(engine.generate(job)) as pieces:
            async for piece in pieces:
                yield len(piece.token_ids)

    return generate, engine.close


async def _plan(generate: Generate, plan: dict[str, Any], number: int) -> dict[str, Any]:
    waiting, answers = iter(enumerate(plan["prompts"])), dict[int, Answer]()
    began, before = time.perf_counter(), time.process_time()

    async def stream() -> None:
        for index, prompt in waiting:
            sent, arrivals, count = time.perf_counter() - began, list[float](), 0
            async with aclosing(generate(f"{number}-{index}", prompt, plan["tokens"])) as steps:
                async for tokens in steps:
                    count += tokens
                    arrivals.append(time.perf_counter() - began)
            answers[index] = Answer(sent, sent, tuple(arrivals), arrivals[-1], len(prompt), 0, count)

    await asyncio.gather(*(stream() for _ in range(plan["streams"])))
    wall = time.perf_counter() - began
    found = [asdict(answers[index]) for index in range(len(plan["prompts"]))]
    return {"answers": found, "wall_s": wall, "busy": (time.process_time() - before) / wall}


async def _work(kind: str, out: Any) -> None:
    generate, close = await asyncio.to_thread(_asyncllm) if kind == "asyncllm" else await _adapter(kind)
    out.write("ready\n")
    out.flush()
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        out.write(orjson.dumps(await _plan(generate, json.loads(line), number)).decode() + "\n")
        out.flush()
    done = close()
    if done is not None:
        await done


if __name__ == "__main__":
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes where errors go
    if sys.argv[1] not in KINDS:
        raise SystemExit(f"{Path(__file__).stem}: one of {', '.join(KINDS)}")
    uvloop.run(_work(sys.argv[1], results))
