"""A running vLLM made another model in place, and the question that tells whether it is. Imports vLLM.

Every engine answers one question of ours before anybody's. What it answered when it was loaded afresh is kept; after
a swap it must answer exactly the same, or it is a mixture of two models and is not used. The question's log
probabilities are those of a whole prompt, so every layer and all of the output head are in each of them. Experts that
the prompt did not reach are not; that no parameter is left of the old model is told by the worker itself.
"""

# pyright: reportUnknownMemberType=false
# (vLLM leaves the arguments of its remote calls without types)

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import vllm
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from citadel.engine import EngineInfo, EngineSpec
from citadel.errors import LlmUnavailable
from engines import hyperqwen_embed
from engines.gguf_weights import ensure_checkpoint
from engines.hf_tokenizer import HfTokenizer, read_json
from engines.hyperqwen_args import CHECKED_FORMAT, Platform
from engines.hyperqwen_checkpoint import Answers, identity, swap_key
from engines.hyperqwen_jobs import Limits
from engines.hyperqwen_memory import revision
from engines.hyperqwen_prefill import TOKENS

_LOG: Final = logging.getLogger("citadel.hyperqwen")

_FIRST: Final = "first"
_QUESTION_TOKENS: Final = 19
_COMMON_TOKENS: Final = 256
"""Vocabularies begin with ordinary tokens; those that stand for images and the like are at their ends."""

_SWAP_S: Final = 300.0
"""For the weights to be read and an answer to be made; a reload that hangs is not waited for."""

_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Model:
    """What the files and vLLM's configuration say of the model that an engine runs.

    `key` says for what it can be swapped in place, `identity` tells its files from changed ones.
    """

    spec: EngineSpec
    info: EngineInfo
    limits: Limits
    key: str | None
    identity: str

    @property
    def name(self) -> str:
        return self.spec.model


def describe(spec: EngineSpec, checkpoint: Path, tokenizer: HfTokenizer, config: VllmConfig, where: Platform) -> Model:
    """Blocks, for it reads the checkpoint's files."""
    scheduler = config.scheduler_config
    in_parts = scheduler.enable_chunked_prefill
    at_once = scheduler.max_num_batched_tokens if "max_num_batched_tokens" in spec.options else TOKENS
    limits = Limits(
        config.model_config.max_model_len,
        min(tokenizer.vocabulary_size, config.model_config.get_vocab_size()),
        seeds=where == "gpu" or not in_parts,
        guesses=config.speculative_config is not None,
        prefill=None if where == "gpu" or in_parts else at_once,
    )
    slots, defaults = scheduler.max_num_seqs, _sampling_defaults(checkpoint)
    info = EngineInfo(limits.context_length, slots, _fingerprint(spec, checkpoint), defaults)
    return Model(spec, info, limits, swap_key(spec), identity(checkpoint))


async def first_answer(llm: AsyncLLM, model: Model) -> list[float]:
    """Log probabilities of a job of our own, before anybody's; of a model that makes embeddings, one of those.

    vLLM keeps its list of tasks; asked for by a caller's job, after a death, it would be waited for for ever. And
    where the CPU has AMX, a process whose first prompt has a few tokens dies of an illegal instruction (vLLM 0.32);
    after one of this length it takes any.
    """
    task = model.spec.task
    if task not in (tasks := await llm.get_supported_tasks()):
        raise LlmUnavailable(model.name, f"vLLM cannot {task} with it, it can {', '.join(tasks)}")
    if llm.vllm_config.parallel_config.pipeline_parallel_size > 1:
        # What a stage is handed by the one before goes into a buffer that only a pass without a job makes: vLLM's
        # warm-up has one, and is left out where nothing is compiled.
        await llm.collective_rpc("execute_dummy_batch")
    common = min(model.limits.vocabulary_size, _COMMON_TOKENS)
    prompt = [37 * place % common for place in range(min(_QUESTION_TOKENS, model.limits.context_length - 1))]
    answer = await (_vector(llm, prompt) if task == "embed" else _log_probabilities(llm, prompt, model))
    if any(map(math.isnan, answer)):
        await _blame_the_files(llm, model)
    await llm.reset_prefix_cache()
    return answer


async def _blame_the_files(llm: AsyncLLM, model: Model) -> None:
    """Of an answer that is no numbers. It may be so for other reasons, which are not ours to judge by."""
    if llm.vllm_config.load_config.load_format != CHECKED_FORMAT:
        return
    unwritten = cast("list[list[str]]", await llm.collective_rpc("unwritten"))
    if names := sorted({name for worker in unwritten for name in worker}):
        raise LlmUnavailable(model.name, f"its files do not have all of {', '.join(names)}")


async def _vector(llm: AsyncLLM, prompt: Sequence[int]) -> list[float]:
    vector: list[float] = []
    async with aclosing(llm.encode(tokens_input(list(prompt)), hyperqwen_embed.parameters(), _FIRST)) as outputs:
        async for output in outputs:
            vector = cast("list[float]", output.outputs.data.tolist())
    return vector


async def remember(model: Model, answer: list[float]) -> None:
    """Keep what a freshly loaded engine answered, unless its files were changed meanwhile."""
    if model.key is not None:
        await asyncio.to_thread(_remember, model, model.key, answer)


async def swap(llm: AsyncLLM, old: Model, spec: EngineSpec) -> Model:
    """Give `llm`, on which no job runs, the weights of `spec`. Raises `LlmUnavailable` unless it then is that model:
    what it is else, nobody knows."""
    to = await asyncio.to_thread(_prospect, spec, old)
    name = spec.model
    if to.model.key is None or to.model.key != old.key:
        raise LlmUnavailable(name, f"its files differ from those of {old.name} in more than their weights")
    if to.answer is None:
        raise LlmUnavailable(name, "it was not loaded here before, so there is no answer to check a swap by")
    async with asyncio.timeout(_SWAP_S):
        if sleeps := llm.vllm_config.model_config.enable_sleep_mode:
            await _make_room(llm)
        left = cast("list[list[str]]", await llm.collective_rpc("swap_weights", args=(str(to.checkpoint),)))
        if any(left):
            raise LlmUnavailable(name, f"vLLM did not renew {', '.join(max(left))}")
        if sleeps and not await llm.wake_up(["kv_cache"]):
            raise LlmUnavailable(name, "vLLM did not wake up")
        if not await llm.reset_prefix_cache():
            raise LlmUnavailable(name, f"vLLM did not let go of what {old.name} had computed")
        if await first_answer(llm, to.model) != to.answer:
            raise LlmUnavailable(name, "with its weights swapped in place vLLM answers otherwise than loaded afresh")
    return to.model


async def _make_room(llm: AsyncLLM) -> None:
    """On a GPU, with vLLM's sleep mode: the memory of the cache and of the old weights, for the reload to work in.

    Nothing of the weights is kept, so they must be loaded before the cache is woken: vLLM would answer with noise.
    """
    await llm.sleep(level=2)
    await llm.wake_up(["weights"])


async def _log_probabilities(llm: AsyncLLM, prompt: Sequence[int], model: Model) -> list[float]:
    """Of the token that follows; before it, where swaps are checked by them, of each of the prompt but the first."""
    of_prompt = None if model.key is None else 0
    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=of_prompt, logprobs=0)
    answer: list[float] = []
    async with aclosing(llm.generate(tokens_input(list(prompt)), wanted, _FIRST)) as outputs:
        async for output in outputs:
            for candidates in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())):
                answer += [candidate.logprob for _, candidate in sorted((candidates or {}).items())]
    return answer


@dataclass(frozen=True, slots=True)
class _Prospect:
    """A model that is to be. `answer` is what it answered when it was loaded afresh."""

    model: Model
    checkpoint: Path
    answer: list[float] | None


def _prospect(spec: EngineSpec, old: Model) -> _Prospect:
    """As far as `old` has it as well; whether it has is told by their keys."""
    checkpoint = _checkpoint(spec)
    info = replace(
        old.info, fingerprint=_fingerprint(spec, checkpoint), sampling_defaults=_sampling_defaults(checkpoint)
    )
    model = Model(spec, info, old.limits, swap_key(spec), identity(checkpoint))
    answer = None if model.key is None else _answers(spec).read(model.key, model.identity)
    return _Prospect(model, checkpoint, answer)


def _remember(model: Model, key: str, answer: list[float]) -> None:
    try:
        if identity(_checkpoint(model.spec)) == model.identity:
            _answers(model.spec).write(key, model.identity, answer)
    except OSError as error:
        _LOG.warning("%s will not be swapped in place, its first answer can't be kept: %s", model.name, error)


def _fingerprint(spec: EngineSpec, checkpoint: Path) -> str:
    return f"hyperqwen-{vllm.__version__}-{revision(spec.source, checkpoint)[:8]}"


def _answers(spec: EngineSpec) -> Answers:
    return Answers(spec.cache_dir / "first-answers", vllm.__version__)


def _checkpoint(spec: EngineSpec) -> Path:
    return ensure_checkpoint(spec.source, spec.cache_dir, lambda _done: None)


def _sampling_defaults(checkpoint: Path) -> dict[str, float]:
    settings = read_json(checkpoint / "generation_config.json")
    return {name: settings[name] for name in _DEFAULTS if isinstance(settings.get(name), int | float)}
