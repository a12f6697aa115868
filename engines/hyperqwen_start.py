"""From a plan to a running vLLM. Imports vLLM, so its environment must be set when this is first imported."""

# pyright: reportUnknownMemberType=false
# (vLLM leaves the arguments of its remote calls without parameters)

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import vllm
import vllm.logger
from pydantic import ValidationError
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.config.logging import LoggingConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from citadel.engine import EngineSpec, Task
from citadel.errors import LlmUnavailable
from engines import hyperqwen_embed
from engines.hf_tokenizer import HfTokenizer
from engines.hyperqwen_args import Plan, Platform, check_options
from engines.hyperqwen_engine import Parts, VllmEngine, give_back
from engines.hyperqwen_process import Processes
from engines.hyperqwen_swap import Model, describe, first_answer, remember

_LOG: Final = logging.getLogger("citadel.hyperqwen")

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MAPPED_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Built:
    """A vLLM that runs, and what was learnt of it."""

    parts: Parts
    model: Model
    tokenizer: HfTokenizer

    def engine(self) -> VllmEngine:
        """On the event loop that the engine is to live on."""
        return VllmEngine(self.parts, self.model, self.tokenizer)

    async def first_answer(self) -> None:
        """That it makes a token says more than that it has started; and swaps to this model are checked by it."""
        await remember(self.model, await first_answer(self.parts.llm, self.model))


def configure(spec: EngineSpec, plan: Plan) -> VllmConfig:
    """vLLM's own configuration, checked by it. Raises `LlmUnavailable` with its reason."""
    check_options(spec, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    arguments: dict[str, Any] = dict(plan.arguments)
    structured = arguments["structured_outputs_config"]
    try:
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**structured)
        return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:
        raise LlmUnavailable(spec.model, f"vLLM refuses its configuration: {_reason(error)}") from error


def start(
    spec: EngineSpec, config: VllmConfig, checkpoint: Path, folder: Path, processes: Processes, where: Platform
) -> Built:
    """Start the engine's process and wait until it is ready. Nothing is left of it if that fails."""
    tokenizer = HfTokenizer(checkpoint)
    model = describe(spec, checkpoint, tokenizer, config, where)
    return Built(Parts(_running(spec, config, folder, processes), processes, folder), model, tokenizer)


def _running(spec: EngineSpec, config: VllmConfig, folder: Path, processes: Processes) -> AsyncLLM:
    try:
        _log_to(folder, config)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        processes.settle()
        _warm_up(llm, spec.task)
    except Exception as error:  # noqa: BLE001 - all that vLLM raises means the same here
        _LOG.debug("vLLM did not start", exc_info=True)
        reason = processes.last_error() or _reason(error)
    else:
        return llm
    # Not from within the handler: what is raised there holds on to the frames of vLLM's start, and these to sockets.
    processes.clear()
    give_back()
    raise LlmUnavailable(spec.model, f"vLLM did not start: {reason}")


def _warm_up(llm: AsyncLLM, task: Task) -> None:
    """Let vLLM import and look up here, in a thread, what it else would on the event loop, for the first job."""
    guidance = llm.vllm_config.structured_outputs_config.backend == "guidance"
    grammar = StructuredOutputsParams(grammar='start: "a"') if guidance else None
    generating = SamplingParams(max_tokens=1, structured_outputs=grammar)
    wanted = generating if task == "generate" else hyperqwen_embed.parameters()
    llm.input_processor.process_inputs("warm-up", tokens_input([0]), wanted, supported_tasks=(task,))


def _log_to(folder: Path, config: VllmConfig) -> None:
    """Let the engine's process log to a file, from which its last error can be told, unless the owner has it log."""
    if config.logging_config.configure_logging:
        return
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(folder / "log"), "formatter": "plain"}},
        "root": {"handlers": ["file"], "level": "WARNING"},
        "loggers": {"vllm": {"level": "INFO"}},
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    config.logging_config = LoggingConfig(configure_logging=True, pylogging_config_file=str(path))
    # What a process has configured it does not configure again: ours keeps its own handlers.
    vllm.logger.__dict__["_last_configured_logging_config"] = config.logging_config


def _reason(error: Exception) -> str:
    """What pydantic wraps in a count of errors, the name of a class and the arguments it was given."""
    if isinstance(error, ValidationError):
        return str(error.errors(include_context=False, include_input=False)[0]["msg"]).removeprefix("Value error, ")
    return str(error) or type(error).__name__


def _settle() -> None:
    """What this process is to do differently for good, now that vLLM and torch are in it.

    They are half a million objects that stay. The collector would look at them all, 0.3 s with every thread at a
    halt, each time that it looks at old objects. At exit it must: some of their modules count theirs then.

    Large blocks are to be mapped, as they are at first: the C library takes to the heap for larger and larger ones,
    and there a model's tokenizer and tables leave holes, some megabytes with each swap.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_ARENA_MAX, 1)


_settle()
