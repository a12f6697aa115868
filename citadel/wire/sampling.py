"""The fields of OpenAI's bodies that say how to choose tokens, alike for chat and for plain completions."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, StrictBool, StrictInt

from citadel.errors import BadRequest
from citadel.messages import SamplingRequest
from citadel.wire.fields import Body

MAX_STOPS: Final = 4
MAX_CHOICES: Final = 8
MAX_TOP_LOGPROBS: Final = 20
_MOST_DIGITS: Final = 10

TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]

_SAME_NAME: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


class SamplingBody(Body):
    """A mixin: an API's own fields stand before these where its class names this one first among its bases."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None


class StreamOptions(Body):
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


def sampling(asked: SamplingBody, max_tokens: int | None, logprobs: int | None) -> SamplingRequest:
    """`logprobs` as in a `SamplingRequest`. Raises BadRequest."""
    if asked.min_tokens and max_tokens is not None and asked.min_tokens > max_tokens:
        raise BadRequest("min_tokens: it is over the output token limit", param="min_tokens")
    values: dict[str, Any] = {name: getattr(asked, name) for name in _SAME_NAME}
    return SamplingRequest(
        **values,
        top_k=0 if asked.top_k == -1 else asked.top_k,
        logit_bias=_logit_bias(asked.logit_bias or {}),
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens or 0,
        ignore_eos=bool(asked.ignore_eos),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logprobs=logprobs,
    )


def stops(given: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Raises BadRequest."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > MAX_STOPS:
        raise BadRequest(f"{param}: at most {MAX_STOPS} sequences, not {len(found)}", param=param)
    if "" in found:
        raise BadRequest(f"{param}: a sequence is empty", param=param)
    return found


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= _MOST_DIGITS):
            raise BadRequest(f"logit_bias: {token!r} is no token id", param="logit_bias")
    return {int(token): bias for token, bias in given.items()}
