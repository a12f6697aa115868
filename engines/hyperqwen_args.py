"""An `EngineSpec` in vLLM's words: the arguments of its AsyncEngineArgs, and the environment it is started in.

Pure: nothing of vLLM is imported, no file is read. What differs between a box with a GPU and one without is here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from citadel.engine import EngineSpec
from citadel.errors import LlmUnavailable

Platform = Literal["cpu", "gpu"]

QUIET: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
"""No telemetry; vLLM's records go to the root logger as everyone's do; its processes keep to themselves what torch
means to change. What the owner has set stays."""

_PREFILL_TOKENS: Final = 4096
"""Prompt tokens in one step, where the context length does not ask for more."""

_GUESSES: Final = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
"""For `mode = "single"` on a GPU: what followed the last tokens before is guessed to follow again, and checked in one
step. Not on a CPU: there vLLM itself warns of a loss, and the one answer that was timed was ten times slower."""

_EAGER: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""Nothing is compiled on a CPU, where vLLM would still have torch compile some lines of its own, by a C++ compiler, at
the first job with log probabilities. Every load ends with such a job: compiling took it 4 s, and 10 s the first time.
As they stand, the lines take 0.6 ms of a step in which 8 jobs ask for log probabilities, and 9 ms with 64."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_HUGE_PAGES: Final = "glibc.malloc.hugetlb"
"""On a CPU weights and cache are the C library's memory: in huge pages a step of 64 streams took a tenth less."""

_DRAIN_S: Final = 3600
"""A terminal's Ctrl-C and a service manager's SIGTERM reach vLLM's processes as well as ours. They must then finish
what runs, as the server does, which ends them itself when it has drained."""

_WORKERS: Final = "engines.hyperqwen_worker.WeightSwap"
CHECKED_FORMAT: Final = "citadel"
"""Our part of vLLM's workers, and the loader that is registered when they import it. An owner who has workers or a
loader of their own (`worker_extension_cls`, `load_format`) does without its check."""

_RESERVED: Final = {"model": "source", "max_num_seqs": "slots", "disable_log_stats": None, "shutdown_timeout": None}
"""Options that are not the owner's to give here, with the key of models.toml that says the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How an engine is started. `environment` is for the start alone; `layout` says it in words, for the log."""

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    layout: str


def check_options(spec: EngineSpec, known: Collection[str]) -> None:
    """`LlmUnavailable` for an option that vLLM does not have (`known`), naming the nearest one it has."""
    for option in spec.options:
        if option in _RESERVED:
            other = _RESERVED[option]
            hint = f"set {other} of the model instead" if other else "it is fixed"
            raise LlmUnavailable(spec.model, f"the option {option!r} of its vllm table can't be set: {hint}")
        if option not in known:
            nearest = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise LlmUnavailable(spec.model, f"vLLM has no option {option!r}{hint}")


def world_size(spec: EngineSpec) -> int:
    """Over how many workers one copy of the model is spread."""
    workers = 1
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = spec.options.get(option, 1)
        if not isinstance(size, int) or size < 1:
            raise LlmUnavailable(spec.model, f"the option {option!r} is {size!r} and not a number of workers")
        workers *= size
    return workers


def check_workers(spec: EngineSpec, platform: Platform, heads: int, layers: int, gpus: int) -> None:
    """`LlmUnavailable` for what vLLM or the platform would refuse when the load has begun; 0 heads: unknown, as layers.

    What it takes to spread a model: each worker has whole heads and whole layers, and a GPU of its own unless Ray, or
    other machines (`nnodes`), have them.
    """
    workers = world_size(spec)
    tensor, pipeline = (spec.options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    ray = spec.options.get("distributed_executor_backend") == "ray"
    elsewhere = ray or spec.options.get("nnodes", 1) > 1
    refused = {
        "vLLM has no Ray on a CPU; without distributed_executor_backend it starts the workers itself": (
            ray and platform == "cpu"
        ),
        "vLLM has no sleep mode on a CPU; leave enable_sleep_mode out": (
            bool(spec.options.get("enable_sleep_mode")) and platform == "cpu"
        ),
        f"its {heads} attention heads can't be shared equally by tensor_parallel_size = {tensor}": (
            heads > 0 and heads % tensor != 0
        ),
        f"its {layers} layers are fewer than pipeline_parallel_size = {pipeline}": 0 < layers < pipeline,
        f"it is spread over {workers} GPUs and this box has {gpus}; Ray has those of others "
        '(distributed_executor_backend = "ray")': platform == "gpu" and not elsewhere and workers > max(1, gpus),
    }
    for reason, applies in refused.items():
        if applies:
            raise LlmUnavailable(spec.model, reason)


def make_plan(
    spec: EngineSpec,
    checkpoint: Path,
    platform: Platform,
    context: int | None,
    dtype: str | None,
    kv_bytes: int,
    cores: Sequence[int],
    owner: Mapping[str, str],
) -> Plan:
    """`context`: tokens of one job, `dtype`: of its numbers; None leaves either to vLLM. `kv_bytes`: for each worker.
    `owner`: the environment.

    `cores`: numbers of those that may be computed on, one for each physical core.
    """
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "max_num_seqs": spec.slots,
        "kv_cache_memory_bytes": kv_bytes,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": _WORKERS,
        "shutdown_timeout": _DRAIN_S,
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
    }
    if "worker_extension_cls" not in spec.options:
        arguments["load_format"] = CHECKED_FORMAT
    if spec.task == "embed":
        arguments["runner"] = "pooling"
    known = {"max_model_len": context, "dtype": dtype}
    arguments |= {name: value for name, value in known.items() if value is not None}
    environment = {name: value for name, value in QUIET.items() if name not in owner}
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would copy our threads' locks as they stand
    layout = "one process with the GPU's defaults"
    if platform == "cpu":
        arguments |= _cpu_arguments(spec.slots, spec.options.get("max_model_len", context) or _PREFILL_TOKENS)
        layout = _cpu_environment(environment, world_size(spec), cores, owner)
    else:
        if (workers := world_size(spec)) > 1:
            layout = f"{workers} workers, one for each GPU"
        if spec.mode == "single":
            arguments["speculative_config"] = _GUESSES
    arguments |= spec.options
    if platform == "cpu" and arguments["enforce_eager"]:
        environment |= {name: value for name, value in _EAGER.items() if name not in owner}
    if guesses := arguments.pop("speculative_config", None):  # an empty table: none are wanted
        arguments["speculative_config"] = dict(guesses)
        layout += f", {guesses.get('method', 'a model')} guesses {guesses.get('num_speculative_tokens', 'some')} tokens"
    return Plan(arguments, environment, f"{layout}, computing in {dtype}" if dtype not in (None, "auto") else layout)


def _cpu_arguments(slots: int, context: int) -> dict[str, Any]:
    return {
        # No compiling, and a cache of stated size: then vLLM starts without its warm-up.
        "enforce_eager": True,
        # A quarter of the default: what a job shares with an earlier one is found in whole blocks.
        "block_size": 32,
        # vLLM's CPU build dies of a seeded request whose prompt is computed in parts; so each is computed in one.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, min(_PREFILL_TOKENS, slots * context)),
    }


def _cpu_environment(environment: dict[str, str], workers: int, cores: Sequence[int], owner: Mapping[str, str]) -> str:
    """Add what the layout needs to `environment`; the layout in words."""
    if _HUGE_PAGES not in (tunables := owner.get(_TUNABLES, "")):
        environment[_TUNABLES] = f"{tunables}:{_HUGE_PAGES}=1".removeprefix(":")
    if workers == 1:
        # The worker inside the engine's process: half the memory and start-up time of one more process.
        environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", owner.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"))
        # A thread on every core fights our event loop for it; vLLM's steps then take up to 60 times as long. They are
        # not bound to cores: other engines of this box compute on the same ones, and one that is bound waits for them.
        threads = owner.get("OMP_NUM_THREADS") or str(max(1, len(cores) - 1))
        environment["OMP_NUM_THREADS"] = threads
        return f"one engine process with its worker, OMP_NUM_THREADS={threads} of {len(cores)} cores"
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    bind = owner.get("VLLM_CPU_OMP_THREADS_BIND") or _shares(cores, workers)
    environment["VLLM_CPU_OMP_THREADS_BIND"] = bind
    return f"{workers} worker processes, VLLM_CPU_OMP_THREADS_BIND={bind}"


def _shares(cores: Sequence[int], workers: int) -> str:
    """Each worker its cores, in vLLM's notation; with fewer cores than workers none is bound."""
    share = len(cores) // workers
    if share == 0:
        return "nobind"
    return "|".join(",".join(map(str, cores[at * share : (at + 1) * share])) for at in range(workers))
