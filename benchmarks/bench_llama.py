"""What each lever of the llama engine brings, and whether it changes the output: the engine alone, lever on and off.

    python -m benchmarks.bench_llama [--levers guessing,sharing,...] [--threads 1] [--tokens 96] [--json]

All greedy, on SmolLM2-135M. A lever is on and off with the same jobs. `decodes` and `computed` count llama.cpp's
batches and the tokens in them, `largest` the tokens of the largest. `cpu_s` is the processor time of the whole process,
which other work on the machine hardly changes, and `tok/s` the tokens of the answers per second of it: with one thread
about what an idle core makes. The last column counts the answers that are those of the same prompt alone, on an engine
that has computed nothing before; of the others it says at which token they part, and how much likelier, in log
probability, the token there was than the one that came instead. llama.cpp rounds differently in batches of other
sizes, so that two tokens as close as that may change places.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from citadel.engine import Engine, EngineSpec, Job, Piece, Sampling, Tokenizer
from engines.llama import Llama
from engines.llama_context import Batch, Context
from tests.models.served import smollm2_gguf

TEXT = (
    "The fisherman of the village had three boats: the Swift, the Patient and the Old Maid. Each morning he chose one "
    "of them by the weather. When the wind came from the west he took the Swift, when it came from the east he took "
    "the Patient, and when there was no wind he took the Old Maid and rowed. "
)
EDIT = f"Copy this text exactly:\n\n{TEXT}{TEXT}"
"""The model does it, but for a comma that it adds."""
FREE = "Write a story about a fisherman who finds a letter in a bottle."
QUESTIONS = [f"Tell me about {thing}." for thing in ("rain", "bread", "ships", "snow", "tea", "bees")]
SYSTEM = "You are the keeper of a library, and know where each book stands. " * 12
"""180 words."""


@dataclass(frozen=True)
class Setting:
    """Jobs run at once if `together`, but the others come when the first has begun its answer, if `late`.

    Each conversation is asked `turns` times, with its answers before.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    slots: int = 8
    context: int = 1024
    together: bool = False
    late: bool = False
    turns: int = 1
    system: str = ""


@dataclass(frozen=True)
class Lever:
    off: Setting
    on: Setting
    asks: Sequence[str]


SERIAL = Setting()
CROWD = Setting(together=True)
LATE = replace(CROWD, late=True)
SHARED = Setting(together=True, system=SYSTEM)
TALKS = Setting(slots=2, turns=2, options={"prompt_cache_mb": 0})


def _with(setting: Setting, **options: Any) -> Setting:
    return replace(setting, options={**setting.options, **options})


LEVERS = {
    "guessing, an edit": Lever(SERIAL, _with(SERIAL, speculative="ngram"), [EDIT]),
    "guessing, a story": Lever(SERIAL, _with(SERIAL, speculative="ngram"), [FREE]),
    "guessing, 4 at once": Lever(CROWD, _with(CROWD, speculative="ngram"), [EDIT, FREE, *QUESTIONS[:2]]),
    "batching": Lever(SERIAL, CROWD, QUESTIONS),
    "sharing a system prompt": Lever(_with(SHARED, kv_unified=False), SHARED, QUESTIONS[:4]),
    "prefill cap": Lever(_with(LATE, prefill_while_decoding=2048), _with(LATE, prefill_while_decoding=16), QUESTIONS),
    "prompt cache": Lever(TALKS, _with(TALKS, prompt_cache_mb=256), [f"{ask} {TEXT * 3}" for ask in QUESTIONS[:3]]),
    "giving way": Lever(CROWD, _with(CROWD, n_ctx=160), QUESTIONS),
}


class Counted:
    """How much llama.cpp was asked to compute since `start()`."""

    def __init__(self) -> None:
        decode = Context.decode

        def counted(context: Context, batch: Batch) -> int:
            self.decodes += 1
            self.computed += batch.count
            self.largest = max(self.largest, batch.count)
            return decode(context, batch)

        Context.decode = counted  # type: ignore[method-assign]
        self.start()

    def start(self) -> None:
        self.decodes = self.computed = self.largest = 0
        self._cpu = time.process_time()

    def cpu_s(self) -> float:
        return time.process_time() - self._cpu


Asked = list[tuple[list[int], list[Piece]]]
"""Each job's prompt, and its answer."""


class Bench:
    def __init__(self, threads: int, tokens: int) -> None:
        folder = Path(tempfile.gettempdir())
        self.spec = EngineSpec("smollm2", smollm2_gguf(), None, 1, 1024, None, folder, {"n_threads": threads})
        self.tokenizer: Tokenizer = Llama.open_tokenizer(self.spec)
        self.tokens = tokens
        self.counted = Counted()
        self._jobs = 0

    async def measure(self, setting: Setting, asks: Sequence[str]) -> tuple[dict[str, Any], Asked]:
        engine = await self._load(setting)
        try:
            await self._answer(engine, self.tokenizer.encode("Hello"), 4)
            self.counted.start()
            asked = await self._converse(engine, setting, asks)
            cpu = self.counted.cpu_s()
        finally:
            await engine.close()
        made = sum(len(_tokens(answer)) for _, answer in asked)
        counted = self.counted
        figures = {"decodes": counted.decodes, "computed": counted.computed, "largest": counted.largest}
        return {**figures, "cpu_s": round(cpu, 2), "tok_s": round(made / cpu, 1)}, asked

    async def differences(self, asked: Asked) -> list[dict[str, Any]]:
        """Of each answer that is not what the same prompt gets alone: where it parts, and the gap there."""
        found: list[dict[str, Any]] = []
        for prompt, answer in asked:
            engine = await self._load(Setting(slots=1))
            try:
                alone = await self._answer(engine, prompt, self.tokens, logprobs=10)
            finally:
                await engine.close()
            entries = [entry for piece in alone for entry in piece.logprobs]
            for place, (entry, token) in enumerate(zip(entries, _tokens(answer), strict=False)):
                if entry.token_id != token:
                    other = next((each.logprob for each in entry.top if each.token_id == token), None)
                    gap = None if other is None else round(entry.logprob - other, 3)
                    found.append({"first_difference": place, "gap": gap})
                    break
        return found

    async def _load(self, setting: Setting) -> Engine:
        options = {**self.spec.options, **setting.options}
        spec = replace(self.spec, slots=setting.slots, context_length=setting.context, options=options)
        return await Llama.load(spec, lambda _fraction: None)

    async def _converse(self, engine: Engine, setting: Setting, asks: Sequence[str]) -> Asked:
        system = f"<|im_start|>system\n{setting.system}<|im_end|>\n" if setting.system else ""
        told = [self.tokenizer.encode(f"{system}<|im_start|>user\n{text}{_ANSWER}") for text in asks]
        asked: Asked = []
        for turn in range(setting.turns):
            if setting.together:
                begun = asyncio.Event()
                first, *others = told
                running = [asyncio.create_task(self._answer(engine, first, self.tokens, begun=begun))]
                if setting.late:
                    await begun.wait()
                running += [asyncio.create_task(self._answer(engine, tokens, self.tokens)) for tokens in others]
                answers = await asyncio.gather(*running)
            else:
                answers = [await self._answer(engine, tokens, self.tokens) for tokens in told]
            asked += [(list(tokens), answer) for tokens, answer in zip(told, answers, strict=True)]
            for tokens, answer in zip(told, answers, strict=True):
                more = f"<|im_end|>\n<|im_start|>user\nWhy? ({turn}){_ANSWER}"
                tokens += [*_tokens(answer), *self.tokenizer.encode(more)]
        return asked

    async def _answer(
        self,
        engine: Engine,
        prompt: list[int],
        tokens: int,
        logprobs: int | None = None,
        begun: asyncio.Event | None = None,
    ) -> list[Piece]:
        self._jobs += 1
        sampling = Sampling(tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        answer: list[Piece] = []
        async with aclosing(engine.generate(Job(str(self._jobs), list(prompt), sampling))) as pieces:
            async for piece in pieces:
                answer.append(piece)
                if begun:
                    begun.set()
        return answer


_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


async def run(names: Sequence[str], threads: int, tokens: int) -> list[dict[str, Any]]:
    bench = Bench(threads, tokens)
    rows: list[dict[str, Any]] = []
    for name in names:
        lever = LEVERS[name]
        for on, setting in (("off", lever.off), ("on", lever.on)):
            figures, asked = await bench.measure(setting, lever.asks)
            differences = await bench.differences(asked) if on == "on" else None
            rows.append({"lever": name, "": on, **figures, "answers": len(asked), "differ": differences})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levers", default=";".join(LEVERS), help=f"some of: {'; '.join(LEVERS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options.levers.split(";"), options.threads, options.tokens))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        "| lever | | decodes | computed | largest | CPU s | tok/s | same as alone |\n|---|---|--:|--:|--:|--:|--:|---|"
    )
    for row in rows:
        cells = (row["lever"], row[""], row["decodes"], row["computed"], row["largest"], row["cpu_s"])
        cells = (*cells, row["tok_s"], _said(row))
        print("| " + " | ".join(map(str, cells)) + " |")


def _said(row: dict[str, Any]) -> str:
    if row["differ"] is None:
        return ""
    parted = "".join(f"; token {each['first_difference']}, gap {each['gap']}" for each in row["differ"])
    return f"{row['answers'] - len(row['differ'])} of {row['answers']}{parted}"


if __name__ == "__main__":
    main()
