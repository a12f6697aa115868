"""How often the test model is exactly right on dialogues it never saw: `python -m tests.models.evaluate [ENGINE...]`.

A dialogue is right if each answer in it is the expected text to the character, reasoning and calls included, given
the dialogue so far.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

from citadel.engine import Engine, EngineSpec, Job, Sampling, Tokenizer
from engines import adapter

from .export import CHECKPOINT, GGUF
from .generate import Dialogue, unseen

DIALOGUES: Final = 200
SLOTS: Final = 32

_SOURCES: Final = {"hyperqwen": CHECKPOINT, "llama": GGUF}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {"llama": {"n_threads": 1}}
"""More threads only wait for each other in so small a model, on a busy machine for minutes."""
_numbers = count()


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded engine with its tokenizer, which completes texts greedily."""

    engine: Engine
    tokenizer: Tokenizer

    async def complete(self, prompt: str, max_tokens: int = 512) -> str:
        """The output without the token that ends it."""
        ids = self.tokenizer.encode(prompt)
        job = Job(f"tiny-{next(_numbers)}", ids, Sampling(max_tokens, temperature=0.0))
        async with aclosing(self.engine.generate(job)) as pieces:
            return "".join([piece.text async for piece in pieces])

    async def complete_all(self, prompts: Sequence[str]) -> list[str]:
        slots = asyncio.Semaphore(self.engine.info.slots)

        async def one(prompt: str) -> str:
            async with slots:
                return await self.complete(prompt)

        return await asyncio.gather(*map(one, prompts))


def spec(engine: str, cache: Path, slots: int = SLOTS, **options: Any) -> EngineSpec:
    mode = "batch" if engine == "hyperqwen" else None
    return EngineSpec("tiny", _SOURCES[engine], mode, slots, None, None, cache, {**_OPTIONS.get(engine, {}), **options})


@asynccontextmanager
async def speaker(name: str, wanted: EngineSpec) -> AsyncIterator[Speaker]:
    found = adapter(name)
    tokenizer = await asyncio.to_thread(found.open_tokenizer, wanted)
    engine = await found.load(wanted, lambda _fraction: None)
    try:
        yield Speaker(engine, tokenizer)
    finally:
        await engine.close()


async def said(speaker: Speaker, dialogues: Sequence[Dialogue]) -> list[list[str]]:
    """Of each dialogue, what the model writes in the place of each answer."""
    prompts = [one.prompt(answer) for one in dialogues for answer in one.answers()]
    texts = iter(await speaker.complete_all(prompts))
    return [list(islice(texts, len(one.answers()))) for one in dialogues]


def expected(dialogues: Sequence[Dialogue]) -> list[list[str]]:
    return [[one.output(answer) for answer in one.answers()] for one in dialogues]


async def main(engines: Sequence[str]) -> None:
    dialogues = unseen(DIALOGUES)
    wanted = expected(dialogues)
    for name in engines:
        with tempfile.TemporaryDirectory() as cache:
            async with speaker(name, spec(name, Path(cache))) as loaded:
                began = time.monotonic()
                found = await said(loaded, dialogues)
                seconds = time.monotonic() - began
        for pairs in zip(wanted, found, strict=True):
            for right, text in zip(*pairs, strict=True):
                if text != right:
                    print(f"expected {right!r}\n    said {text!r}")
        right = sum(one == other for one, other in zip(wanted, found, strict=True))
        print(f"{name}: {right} of {len(found)} dialogues exactly right, in {seconds:.1f} s")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(_SOURCES)))
