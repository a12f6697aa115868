"""The owner's bound on how long a model may think: past it the reasoning is closed, and the answer has to begin.

Engines know nothing of it. The job is ended, and a second one goes on behind the prompt, the reasoning so far and the
family's closing marker; an engine with a prefix cache has all of that computed already. What is put in the model's
mouth is read like its own words, and costs nothing. Reasoning that the model opens once more is not cut again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from citadel.engine import Engine, Job, Piece, Sampling, Tokenizer
from citadel.text.formats import Format
from citadel.text.reader import Reader

_OPENING: Final = 32
"""The marker that opened the reasoning is among this many tokens before or after its start."""


@dataclass(frozen=True, slots=True)
class Budget:
    """`tokens` of reasoning. `grammar` makes the one that an answer without reasoning is held to, None if none."""

    tokens: int
    format: Format
    tokenizer: Tokenizer
    grammar: Callable[[], Awaitable[str | None]]


async def bounded(engine: Engine, job: Job, reader: Reader, budget: Budget) -> AsyncGenerator[Piece, None]:
    """The output of `job`, which `reader` is given piece by piece, with reasoning of the budget and a piece at most."""
    made: list[int] = []
    cached = 0
    async with aclosing(engine.generate(job)) as pieces:
        async for piece in pieces:
            made += piece.token_ids
            cached = piece.cached_tokens
            yield piece
            # A piece without text is in the midst of a character.
            if reader.in_reasoning and reader.reasoning_tokens >= budget.tokens and piece.text:
                break
        else:
            return
    if reader.finished or piece.finish is not None:
        return
    closing = _closing(job, made, budget)
    prompt = [*job.prompt, *made, *budget.tokenizer.encode(closing)]
    room = min(job.sampling.max_tokens - len(made), engine.info.context_length - len(prompt))
    yield Piece(closing, (), cached, finish=None if room > 0 else "length")
    if room > 0:
        sampling = _rest(job.sampling, len(made), room)
        after = Job(f"{job.id}-answer", prompt, sampling, await budget.grammar())
        async with aclosing(engine.generate(after)) as pieces:
            async for piece in pieces:
                yield replace(piece, cached_tokens=cached)  # of the caller's prompt, not of the second one's


def _closing(job: Job, made: list[int], budget: Budget) -> str:
    """What ends the reasoning as the model would have, and leads to its answer."""
    if budget.format.channels:
        return "<|end|><|start|>assistant"
    near = budget.tokenizer.decode([*job.prompt[-_OPENING:], *made[:_OPENING]])
    thinking = budget.format.thinking
    opened = next((one for one in thinking if one.open in near), thinking[0])
    return f"\n{opened.close}\n\n{opened.answer[0] if opened.answer else ''}"


def _rest(sampling: Sampling, made: int, room: int) -> Sampling:
    return replace(sampling, max_tokens=room, min_tokens=min(max(0, sampling.min_tokens - made), room))
