"""The keys of a model's `llama` or `strata` table in models.toml, as data, and what they mean for llama.cpp."""

from __future__ import annotations

import ctypes
import difflib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from citadel.errors import LlmUnavailable
from engines.plan import TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from citadel.engine import EngineSpec
    from engines.plan import Tier

_CACHE_TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
SMALL_CACHE: Final = {"type_k": _CACHE_TYPES["q8_0"], "type_v": _CACHE_TYPES["q8_0"]}
"""What halves the cache at next to no loss."""
_SPLITS: Final = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_POOLINGS: Final = {"mean": 1, "cls": 2, "last": 3}
_ROPE_SCALINGS: Final = {"none": 0, "linear": 1, "yarn": 2, "longrope": 3}
_LOAD: Final = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""llama_load_mode by `use_mmap` and `use_mlock`."""
_SPECULATIVE: Final = {"off": 0, "ngram": 1}
_DEVICES: Final = 256


def _whole(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"is a whole number of {least} or more")
        return value

    return check


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is a number")  # noqa: TRY004 - every refusal of a value is one kind of error
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is true or false")  # noqa: TRY004 - as above
    return value


def _one_of(names: Mapping[str, int]) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if value not in names:
            raise ValueError(f"is one of {', '.join(names)}")
        return names[value]

    return check


def _flash(value: Any) -> int:
    if value == "auto":
        return -1
    if not isinstance(value, bool):
        raise ValueError('is true, false or "auto"')  # noqa: TRY004 - as above
    return int(value)


def _shares(value: Any) -> list[float]:
    if not isinstance(value, list | tuple):
        raise ValueError("is a list of numbers, one per GPU")  # noqa: TRY004 - as above
    return [_number(share) for share in cast("list[Any]", value)]


def _tiers(value: Any) -> tuple[tuple[re.Pattern[str], Tier], ...]:
    """A table of patterns of tensors' names, the first that is found in a name counts."""
    if not isinstance(value, dict) or not set(cast("dict[str, Any]", value).values()) <= set(TIERS):
        raise ValueError(f"is a table of patterns with {', '.join(TIERS)}")
    try:
        return tuple((re.compile(pattern), tier) for pattern, tier in cast("dict[str, Tier]", value).items())
    except re.error as error:
        raise ValueError(f"has a pattern that is none ({error})") from None


def _gigabytes(value: Any) -> int:
    number = _number(value)
    if not 0 <= number < 1e9:
        raise ValueError("is a number of gigabytes")
    return int(number * 1e9)


@dataclass(frozen=True, slots=True)
class Option:
    """`field` is that of llama.cpp's model or context parameters, where the value simply goes there."""

    check: Callable[[Any], Any]
    default: Any = None
    of: str | None = None
    field: str | None = None


OPTIONS: Final[dict[str, Option]] = {
    "n_gpu_layers": Option(_whole(-1), -1, "model", "n_gpu_layers"),
    "main_gpu": Option(_whole(0), None, "model", "main_gpu"),
    "split_mode": Option(_one_of(_SPLITS), None, "model", "split_mode"),
    "tensor_split": Option(_shares),
    "use_mmap": Option(_flag),
    "use_mlock": Option(_flag),
    "use_extra_bufts": Option(_flag, None, "model", "use_extra_bufts"),
    "check_tensors": Option(_flag, None, "model", "check_tensors"),
    "n_ctx": Option(_whole(1)),
    "n_batch": Option(_whole(1), 2048, "context", "n_batch"),
    "n_ubatch": Option(_whole(1), 512, "context", "n_ubatch"),
    "n_threads": Option(_whole(1), None, "context", "n_threads"),
    "n_threads_batch": Option(_whole(1), None, "context", "n_threads_batch"),
    "kv_unified": Option(_flag, True, "context", "kv_unified"),
    "swa_full": Option(_flag, True, "context", "swa_full"),
    "flash_attn": Option(_flash, None, "context", "flash_attn_type"),
    "type_k": Option(_one_of(_CACHE_TYPES), _CACHE_TYPES["f16"], "context", "type_k"),
    "type_v": Option(_one_of(_CACHE_TYPES), _CACHE_TYPES["f16"], "context", "type_v"),
    "offload_kqv": Option(_flag, None, "context", "offload_kqv"),
    "op_offload": Option(_flag, None, "context", "op_offload"),
    "pooling": Option(_one_of(_POOLINGS), None, "context", "pooling_type"),
    "rope_scaling_type": Option(_one_of(_ROPE_SCALINGS), None, "context", "rope_scaling_type"),
    "rope_freq_base": Option(_number, None, "context", "rope_freq_base"),
    "rope_freq_scale": Option(_number, None, "context", "rope_freq_scale"),
    "yarn_ext_factor": Option(_number, None, "context", "yarn_ext_factor"),
    "yarn_attn_factor": Option(_number, None, "context", "yarn_attn_factor"),
    "yarn_beta_fast": Option(_number, None, "context", "yarn_beta_fast"),
    "yarn_beta_slow": Option(_number, None, "context", "yarn_beta_slow"),
    "yarn_orig_ctx": Option(_whole(0), None, "context", "yarn_orig_ctx"),
    "prefill_while_decoding": Option(_whole(1), 128),
    "prompt_cache_mb": Option(_whole(0), 256),
    "speculative": Option(_one_of(_SPECULATIVE), _SPECULATIVE["off"]),
    "speculative_tokens": Option(_whole(1), 16),
    "speculative_ngram": Option(_whole(1), 4),
    "gpu_memory_gb": Option(_gigabytes),
}

_PLANNED: Final = ("split_mode", "tensor_split", "use_mmap", "use_mlock", "use_extra_bufts")
"""What a plan over GPU, RAM and disk settles itself."""

STRATA_OPTIONS: Final[dict[str, Option]] = {
    **{key: option for key, option in OPTIONS.items() if key not in _PLANNED},
    "ram_gb": Option(_gigabytes),
    "place": Option(_tiers, ()),
    "session_mb": Option(_whole(0), 0),
}
TABLES: Final = {"llama": OPTIONS, "strata": STRATA_OPTIONS}


@dataclass(frozen=True, slots=True)
class Settings:
    """`model` and `context` are fields of llama.cpp's parameters; `cells` is None for slots times context length.

    `prompt_cache` is in bytes. `draft` tokens are guessed at once at most, from what followed the last `ngram`.
    `gpu_memory` and `ram` are the most bytes that a plan may take; `gpu_layers` is None where the plan says how many;
    with `disk` weights may stay there. `session` bytes of an unloaded model's memory are kept.
    """

    model: Mapping[str, Any]
    context: Mapping[str, Any]
    cells: int | None
    prompt_beside: int
    prompt_cache: int
    draft: int
    ngram: int
    gpu_layers: int | None = None
    gpu_memory: int | None = None
    ram: int | None = None
    place: tuple[tuple[re.Pattern[str], Tier], ...] = ()
    disk: bool = False
    session: int = 0


def settings_of(spec: EngineSpec, engine: str = "llama") -> Settings:
    """`engine` is a key of `TABLES`. Raises `LlmUnavailable` that names the key at fault."""
    values = {key: option.default for key, option in (OPTIONS | STRATA_OPTIONS).items()}
    for key, value in spec.options.items():
        values[key] = _checked(spec, engine, key, value)
    threads = values["n_threads"] or len(os.sched_getaffinity(0))
    values["n_threads"] = threads
    values["n_threads_batch"] = values["n_threads_batch"] or threads
    values["n_batch"] = max(values["n_batch"], spec.slots)
    model = _fields(values, "model")
    if values["use_mmap"] is not None or values["use_mlock"] is not None:
        mapped = values["use_mmap"] if values["use_mmap"] is not None else True
        model["load_mode"] = _LOAD[mapped, bool(values["use_mlock"])]
    if values["tensor_split"]:
        model["tensor_split"] = _per_device(spec, values["tensor_split"])
    return Settings(
        model,
        _fields(values, "context"),
        values["n_ctx"],
        values["prefill_while_decoding"],
        values["prompt_cache_mb"] * 1_000_000,
        draft=values["speculative_tokens"] if values["speculative"] else 0,
        ngram=values["speculative_ngram"],
        gpu_layers=values["n_gpu_layers"] if "n_gpu_layers" in spec.options else None,
        gpu_memory=values["gpu_memory_gb"],
        ram=values["ram_gb"],
        place=values["place"],
        disk=engine == "strata",
        session=values["session_mb"] * 1_000_000,
    )


def _checked(spec: EngineSpec, engine: str, key: str, value: Any) -> Any:
    option = TABLES[engine].get(key)
    if option is None:
        near = difflib.get_close_matches(key, TABLES[engine], n=1, cutoff=0.0)[0]
        raise LlmUnavailable(spec.model, f"{engine} has no option {key!r}; the nearest is {near!r}")
    try:
        return option.check(value)
    except ValueError as error:
        raise LlmUnavailable(spec.model, f"{engine}'s option {key!r} {error}, not {value!r}") from None


def _fields(values: Mapping[str, Any], of: str) -> dict[str, Any]:
    return {
        option.field: values[key]
        for key, option in OPTIONS.items()
        if option.of == of and option.field and values[key] is not None
    }


def _per_device(spec: EngineSpec, shares: list[float]) -> Any:
    """llama.cpp reads a number for each device that it was built for, so the rest must be there, as zeros."""
    if len(shares) > _DEVICES:
        raise LlmUnavailable(spec.model, f"llama's option 'tensor_split' has {_DEVICES} numbers at most")
    return (ctypes.c_float * _DEVICES)(*shares)
