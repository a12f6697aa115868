"""A GGUF's table as the planner wants it: what each tensor is for, what a layer's cache takes, what computing takes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.gguf_header import BLOCKS, NotGguf
from engines.plan import TIED, Model, Weight

if TYPE_CHECKING:
    from engines.gguf_header import TensorEntry
    from engines.gguf_parts import Table
    from engines.plan import Kind

MOST_LAYERS: Final = 512
"""llama.cpp aborts beyond."""
_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS: Final = re.compile(r"ffn_(up|down|gate|gate_up)_(ch)?exps\b")
_FORWARD: Final = re.compile(r"blk\.\d+\.ffn_(up|down|gate)\.")
_BASE_BYTES: Final = 64 << 20
"""What a load takes beside weights, cache and compute: the vocabulary, llama.cpp's own structures."""
_LIVE_ACTIVATIONS: Final = 8
"""Activations of a batch that are in memory at once, in units of the embedding, beside those of the feed-forward."""
CACHE_TYPES: Final = {number: size / block for number, (_, block, size) in BLOCKS.items()}
"""Bytes of one number in the cache, by ggml's number for the type."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a model is loaded for: `cells` tokens of cache in all, `batch` tokens computed at once, `outputs` logits.

    `type_k` and `type_v` are ggml's numbers of the cache's types; `kept` bytes of RAM are for copies of the cache.
    Each of `sequences` has a state of its own in a recurrent layer.
    """

    cells: int
    outputs: int = 1
    batch: int = 512
    type_k: int = 1
    type_v: int = 1
    kept: int = 0
    sequences: int = 1


def layers_of(table: Table) -> int:
    """The number of layers; `NotGguf` where it is none that llama.cpp takes."""
    layers = table.count("block_count")
    if not 0 < layers <= MOST_LAYERS:
        raise NotGguf(f"it has {layers} layers")
    return layers


def describe(table: Table, workload: Workload) -> Model:
    """Raises `NotGguf` for a table that can't be one of a model."""
    layers = layers_of(table)
    used, experts = table.count("expert_used_count"), table.count("expert_count")
    share = used / experts if 0 < used <= experts else 1.0
    weights = tuple(_weight(tensor, layers, share) for tensor in table.tensors)
    names = {weight.name for weight in weights}
    return Model(
        weights,
        cache=tuple(_cache_bytes(table, layers, workload)),
        compute=_compute_bytes(table, workload),
        base=_BASE_BYTES + workload.kept,
        tied="output.weight" not in names and TIED in names,
    )


def _weight(tensor: TensorEntry, layers: int, share: float) -> Weight:
    kind, layer = _kind(tensor.name)
    if layer is not None and layer >= layers:
        raise NotGguf(f"the tensor {tensor.name!r} is of a layer that there is not")
    read = float(tensor.size)
    if kind == "expert":
        read *= share
    elif kind == "embedding":
        read /= max(1, math.prod(tensor.shape[1:]))
    return Weight(tensor.name, tensor.size, tensor.type, kind, layer, read, bool(_FORWARD.match(tensor.name)))


def _kind(name: str) -> tuple[Kind, int | None]:
    if match := _OF_LAYER.match(name):
        return ("expert" if _EXPERTS.match(match[2]) else "core"), int(match[1])
    return ("embedding" if "token_embd." in name else "output"), None


def _cache_bytes(table: Table, layers: int, workload: Workload) -> list[int]:
    """Bytes of each layer's cache; as if each layer that attends attended to all tokens, and not to a window."""
    heads = table.count("attention.head_count", 1)
    keyed = table.per_layer("attention.head_count_kv", layers, heads)
    size = table.count("embedding_length") // max(1, heads)
    key = table.count("attention.key_length", size) * CACHE_TYPES[workload.type_k]
    value = table.count("attention.value_length", size) * CACHE_TYPES[workload.type_v]
    if table.count("attention.value_length_mla"):
        value = 0  # latent attention computes the values from what it keeps as keys
    recurrent, attending = _layers_with(table, "ssm_"), _layers_with(table, "attn_k.")
    state = workload.sequences * _state_bytes(table)
    return [
        (state if layer in recurrent else 0)
        + (0 if layer in recurrent - attending else math.ceil(workload.cells * count * (key + value)))
        for layer, count in enumerate(keyed)
    ]


def _layers_with(table: Table, beginning: str) -> set[int]:
    """The layers that have a tensor whose name begins so."""
    matches = (_OF_LAYER.match(tensor.name) for tensor in table.tensors)
    return {int(match[1]) for match in matches if match and match[2].startswith(beginning)}


def _state_bytes(table: Table) -> int:
    """What a recurrent layer (Mamba and its like, gated delta nets) keeps of a sequence, however long that is."""
    kernel, inner, groups, size = (
        table.count(f"ssm.{key}") for key in ("conv_kernel", "inner_size", "group_count", "state_size")
    )
    return 4 * (max(0, kernel - 1) * (inner + 2 * groups * size) + size * inner)


def _compute_bytes(table: Table, workload: Workload) -> int:
    """The activations of one physical batch, and the logits of every output twice: llama.cpp's and the draw's."""
    embedding = table.count("embedding_length")
    forward = table.count("feed_forward_length", 4 * embedding)
    expert = table.count("expert_feed_forward_length") * table.count("expert_used_count", 1)
    rows = next((tensor.shape[-1] for tensor in table.tensors if tensor.name == TIED), 1 << 17)
    vocabulary = table.count("vocab_size", rows)
    mask = 4 * workload.batch * workload.cells
    activations = _LIVE_ACTIVATIONS * embedding + 3 * max(forward, expert)
    return 4 * workload.batch * activations + mask + 8 * workload.outputs * vocabulary
