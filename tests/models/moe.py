"""A GGUF of a mixture of experts (qwen3moe) with made-up weights, of any size, for what plans where weights live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.gguf_file import finish

Matrix = Callable[[Any, str, tuple[int, ...]], None]
"""Adds a matrix of weights to the writer, by its name and shape."""


@dataclass(frozen=True)
class Moe:
    width: int
    layers: int
    forward: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    used: int
    context: int


@dataclass(frozen=True)
class Vocabulary:
    """The first tokens are the `special` ones; the second begins a text and the third ends it."""

    tokens: Sequence[str]
    merges: Sequence[str]
    special: int = 3


def write(path: Path, model: Moe, vocabulary: Vocabulary, matrix: Matrix, template: str | None = None) -> Path:
    import gguf  # noqa: PLC0415 - the tests skip where it is not installed

    writer: Any = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([3 if at < vocabulary.special else 1 for at in range(len(vocabulary.tokens))])
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.forward)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head)
    writer.add_value_length(model.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(model.experts)
    writer.add_expert_used_count(model.used)
    writer.add_expert_feed_forward_length(model.forward)
    _add_weights(writer, model, len(vocabulary.tokens), matrix)
    finish(writer)
    return path


def _add_weights(writer: Any, model: Moe, tokens: int, matrix: Matrix) -> None:
    width, queries, keys = model.width, model.heads * model.head, model.kv_heads * model.head

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix(writer, "token_embd", (tokens, width))
    ones("output_norm", width)
    matrix(writer, "output", (tokens, width))
    for layer in range(model.layers):
        block = f"blk.{layer}."
        for name, size in (("attn", width), ("ffn", width), ("attn_q", model.head), ("attn_k", model.head)):
            ones(f"{block}{name}_norm", size)
        matrix(writer, f"{block}attn_q", (queries, width))
        matrix(writer, f"{block}attn_k", (keys, width))
        matrix(writer, f"{block}attn_v", (keys, width))
        matrix(writer, f"{block}attn_output", (width, queries))
        matrix(writer, f"{block}ffn_gate_inp", (model.experts, width))
        matrix(writer, f"{block}ffn_gate_exps", (model.experts, model.forward, width))
        matrix(writer, f"{block}ffn_up_exps", (model.experts, model.forward, width))
        matrix(writer, f"{block}ffn_down_exps", (model.experts, width, model.forward))
