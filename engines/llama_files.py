"""A model's files, read without its weights: which they are, whether they can be loaded, what that takes."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import llama_cpp

from citadel.engine import Need
from citadel.errors import LlmUnavailable
from engines.gguf_header import NotGguf
from engines.gguf_parts import MissingPart, part_number, read_table
from engines.llama_draft import DRAFTING
from engines.llama_native import gpu_offload
from engines.llama_options import CELL_BYTES, Settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from citadel.engine import EngineSpec

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""A file's sampling defaults, by our names."""
_MOST_LAYERS: Final = 512
"""llama.cpp aborts beyond."""
_BASE_BYTES: Final = 64 << 20
"""What a load takes beside weights, cache and compute: the vocabulary, llama.cpp's own structures."""
_LIVE_ACTIVATIONS: Final = 8
"""Activations of a batch that are in memory at once, in units of the embedding, beside those of the feed-forward."""


class Weights:
    """The file to load (the first part where it is split), and what it says of itself."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises `LlmUnavailable`."""
        self.path = find(spec)
        with _refusing(spec, self.path):
            self.table = read_table(self.path)
            self.layers = self.table.count("block_count")
            if not 0 < self.layers <= _MOST_LAYERS:
                raise NotGguf(f"it has {self.layers} layers")
            self.context_length = self.table.count("context_length") or None

    def check_complete(self, spec: EngineSpec) -> None:
        """Raises `LlmUnavailable` where a file is shorter than its header says."""
        with _refusing(spec, self.path):
            self.table.check_complete()

    @property
    def chat_template(self) -> str | None:
        template = self.table.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.path.name}\n{self.path.stat().st_size}\n".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(1 << 20))
        return f"llama-{llama_cpp.__version__}-{digest.hexdigest()[:8]}"

    def sampling_defaults(self) -> dict[str, float]:
        found = {ours: self.table.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}


def find(spec: EngineSpec) -> Path:
    if not spec.source.is_dir():
        return spec.source
    found = [
        path
        for path in sorted(spec.source.glob("*.gguf"))
        if not path.name.startswith("mmproj") and part_number(path.name) in (None, 1)
    ]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise LlmUnavailable(spec.model, f"{spec.source.name} must hold one GGUF model, and holds {names}")
    return found[0]


@contextmanager
def _refusing(spec: EngineSpec, path: Path) -> Generator[None]:
    """Says what is wrong with the files in the words of the port."""
    try:
        yield
    except MissingPart as error:
        raise LlmUnavailable(spec.model, str(error)) from None
    except NotGguf as error:
        raise LlmUnavailable(spec.model, f"{path.name} can't be loaded: {error}") from None
    except OSError as error:
        raise LlmUnavailable(spec.model, f"{path.name}: {error.strerror}") from None


def context_length(spec: EngineSpec, weights: Weights) -> int:
    """Tokens of one job, prompt and output."""
    length = spec.context_length or weights.context_length
    if not length:
        raise LlmUnavailable(spec.model, "the file names no context length; set context_length")
    return length


def cells(spec: EngineSpec, settings: Settings, weights: Weights) -> int:
    """Tokens that the cache holds, all slots together."""
    return settings.cells or spec.slots * context_length(spec, weights)


def need(spec: EngineSpec) -> Need:
    settings = settings_of(spec)
    weights = Weights(spec)
    weights.check_complete(spec)
    total = spec.memory_bytes if spec.memory_bytes is not None else _estimate(spec, settings, weights)
    on_gpu = int(total * _share_on_gpu(settings, weights))
    cache = 0 if spec.memory_bytes is not None else settings.prompt_cache
    return Need(ram=total - on_gpu + cache, gpu=on_gpu)


def check_machine(spec: EngineSpec) -> None:
    """Refuses what this machine could never hold: the system would kill the process while the cache is filled."""
    wanted = need(spec).ram
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > total:
        numbers = f"it needs {wanted / 1e9:.2f} GB of RAM, the machine has {total / 1e9:.2f} GB"
        raise LlmUnavailable(spec.model, f"out of memory: {numbers}")


def _share_on_gpu(settings: Settings, weights: Weights) -> float:
    layers = settings.model["n_gpu_layers"]
    if not gpu_offload():
        return 0.0
    # The output matrix counts as a layer of its own.
    return 1.0 if layers < 0 else min(1.0, layers / (weights.layers + 1))


def _estimate(spec: EngineSpec, settings: Settings, weights: Weights) -> int:
    cache = cells(spec, settings, weights) * _cell_bytes(settings, weights)
    return int(weights.table.size + cache + _compute_bytes(spec, settings, weights) + _BASE_BYTES)


def _cell_bytes(settings: Settings, weights: Weights) -> float:
    """Bytes that one token takes in the cache, over all layers."""
    table = weights.table
    heads = table.count("attention.head_count", 1)
    keyed = table.per_layer("attention.head_count_kv", weights.layers, heads)
    size = table.count("embedding_length") // max(1, heads)
    key = table.count("attention.key_length", size) * CELL_BYTES[settings.context["type_k"]]
    value = table.count("attention.value_length", size) * CELL_BYTES[settings.context["type_v"]]
    return sum(keyed) * (key + value)


def _compute_bytes(spec: EngineSpec, settings: Settings, weights: Weights) -> int:
    """The activations of one physical batch, and the logits of every output twice: llama.cpp's and the draw's."""
    table = weights.table
    embedding = table.count("embedding_length")
    forward = table.count("feed_forward_length", 4 * embedding)
    vocabulary = table.count("vocab_size", 1 << 17)
    batch = settings.context["n_ubatch"]
    mask = 4 * batch * cells(spec, settings, weights)
    outputs = spec.slots + DRAFTING * settings.draft
    return 4 * batch * (_LIVE_ACTIVATIONS * embedding + 3 * forward) + mask + 8 * outputs * vocabulary
