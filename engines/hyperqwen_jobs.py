"""A `Job` in vLLM's words: what is refused before vLLM sees it, and its SamplingParams. Imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from citadel.engine import Job
from citadel.errors import BadRequest, ContextLengthExceeded

_SEEDS: Final = 1 << 63
"""vLLM takes -1 for no seed, and dies of one that is no 64-bit integer: all are taken modulo this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded engine can do. `vocabulary_size`: ids below it are both the tokenizer's and the model's."""

    context_length: int
    vocabulary_size: int
    seeds: bool
    guesses: bool
    """Speculative decoding, with which vLLM has neither min_p nor logit_bias."""
    prefill: int | None = None
    """Tokens of prompts that the engine is given at a time; None: as many as come."""


def blamed(error: Exception) -> BadRequest:
    """What the caller is told of an error by which vLLM refuses the request."""
    param = error.parameter if isinstance(error, VLLMValidationError) else None
    return BadRequest(str(error.args[0]) if error.args else str(error), param)


def parameters(job: Job, limits: Limits) -> SamplingParams:
    """vLLM's parameters, every field that matters set. Raises `BadRequest` for a job that can't be run as asked."""
    _check(job, limits)
    try:
        return _sampling_params(job, limits)
    except VLLMClientError as error:
        raise blamed(error) from error


def _sampling_params(job: Job, limits: Limits) -> SamplingParams:
    sampling = job.sampling
    max_tokens = min(sampling.max_tokens, limits.context_length - len(job.prompt))
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=None if sampling.seed is None else sampling.seed % _SEEDS,
        stop=None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        logprobs=sampling.logprobs,
        logit_bias=dict(sampling.logit_bias) or None,
        structured_outputs=None if job.grammar is None else StructuredOutputsParams(grammar=job.grammar),
        detokenize=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _check(job: Job, limits: Limits) -> None:
    """The refusals that vLLM would make late, in other words, or not at all and die of."""
    if not job.prompt:
        raise BadRequest("The prompt is empty", "messages")
    if len(job.prompt) >= limits.context_length:
        raise ContextLengthExceeded(limits.context_length, len(job.prompt))
    sampling = job.sampling
    if sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(f"min_tokens is over max_tokens, which is {sampling.max_tokens}", "min_tokens")
    if sampling.seed is not None and not limits.seeds:
        raise BadRequest("This model is loaded with enable_chunked_prefill, with which vLLM has no seed", "seed")
    if limits.guesses and (sampling.min_p > 0 or sampling.logit_bias):
        param = "min_p" if sampling.min_p > 0 else "logit_bias"
        raise BadRequest(f"This model is loaded with speculative decoding, with which vLLM has no {param}", param)
    for param, token_ids in (
        (None, job.prompt),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocabulary_size:
            raise BadRequest(f"A token id is not below {limits.vocabulary_size}, the size of the vocabulary", param)
