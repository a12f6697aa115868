"""Sixteen streams at once on each real engine: nobody gets another's words.

Decoding in a batch rounds differently than decoding alone, so a greedy text may part from the one made alone where
two tokens are nearly as likely. How much batching alone moves the logprobs is measured here, over the tokens before
the texts part, and a parting is accepted only between candidates that are closer than twice that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.conftest import events_of
from tests.real.conftest import MODELS, asking

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TOPICS = (
    "the sea", "a clock", "bread", "the moon", "trains", "a violin", "winter", "maps",
    "honey", "a lighthouse", "glass", "chess", "rivers", "a library", "salt", "kites",
)  # fmt: skip


MAX_TOKENS = 32
END = "<|im_end|>"
"""What the model says, among the candidates, where it ends; it is not in the output."""


@dataclass(frozen=True)
class Output:
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[dict[str, float], ...]

    def at(self, index: int) -> str:
        return self.tokens[index] if index < len(self.tokens) else END


async def write(session: aiohttp.ClientSession, model: str, topic: str, *, stream: bool) -> Output:
    asked = asking(f"Write two sentences about {topic}.", model=model, temperature=0, max_tokens=MAX_TOKENS)
    asked |= {"logprobs": True, "top_logprobs": 5, "stream": stream}
    async with session.post("/v1/chat/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        if stream:
            found, finish = await _streamed(response)
        else:
            choice = (await response.json())["choices"][0]
            found, finish = choice["logprobs"]["content"], choice["finish_reason"]
    assert finish == ("length" if len(found) == MAX_TOKENS else "stop"), "a token is missing"
    return Output(
        tuple(each["token"] for each in found),
        tuple(each["logprob"] for each in found),
        tuple({top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in found),
    )


async def _streamed(response: aiohttp.ClientResponse) -> tuple[list[dict[str, Any]], str]:
    data, _ = await events_of(response)
    choices = [choice for event in data for choice in event["choices"]]
    found = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    return found, choices[-1]["finish_reason"]


def common(one: Output, other: Output) -> int:
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


@pytest.mark.parametrize("model", MODELS)
async def test_parallel_streams_do_not_mix(session: aiohttp.ClientSession, model: str) -> None:
    alone = [await write(session, model, topic, stream=True) for topic in TOPICS]
    assert len({output.tokens for output in alone}) == len(TOPICS)
    together = await asyncio.gather(*(write(session, model, topic, stream=True) for topic in TOPICS))
    moved = max(
        abs(one.logprobs[index] - other.logprobs[index])
        for one, other in zip(alone, together, strict=True)
        for index in range(common(one, other))
    )
    print(f"{model}: batching moved the logprob of a token by at most {moved:.4f}")
    for topic, one, other in zip(TOPICS, alone, together, strict=True):
        at = common(one, other)
        if one.tokens != other.tokens:
            candidates = (one if at < len(one.tokens) else other).alternatives[at]
            parted = {one.at(at), other.at(at)}
            assert parted <= candidates.keys(), f"{topic}: {other.tokens} is not what it says alone: {one.tokens}"
            gap = abs(candidates[one.at(at)] - candidates[other.at(at)])
            assert gap < 2 * moved, f"{topic}: parted at token {at} over a gap of {gap:.3f}"
