"""Tiny models with random weights and SmolLM2's vocabulary: architectures whose memory works in other ways."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rigs import SMOLLM2

from tests.models.gguf_file import finish

_WIDTH, _LAYERS, _FORWARD, _HEAD = 64, 4, 128, 16
_VOCABULARY_KEYS = {
    "tokenizer.ggml.model": "add_tokenizer_model",
    "tokenizer.ggml.pre": "add_tokenizer_pre",
    "tokenizer.ggml.tokens": "add_token_list",
    "tokenizer.ggml.token_type": "add_token_types",
    "tokenizer.ggml.merges": "add_token_merges",
    "tokenizer.ggml.bos_token_id": "add_bos_token_id",
    "tokenizer.ggml.eos_token_id": "add_eos_token_id",
}


@cache
def _vocabulary() -> dict[str, Any]:
    """Reading it takes seconds."""
    import gguf  # noqa: PLC0415 - the tests skip where it is not installed

    fields = gguf.GGUFReader(SMOLLM2).fields
    return {key: fields[key].contents() for key in _VOCABULARY_KEYS}


def write_model(path: Path, architecture: str) -> None:
    import gguf  # noqa: PLC0415 - as above

    writer: Any = gguf.GGUFWriter(path, architecture)
    vocabulary = _vocabulary()
    for key, method in _VOCABULARY_KEYS.items():
        getattr(writer, method)(vocabulary[key])
    writer.add_context_length(4096)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FORWARD)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.2).astype(np.float32))

    def ones(name: str, size: int = _WIDTH) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    tensor("token_embd", len(vocabulary["tokenizer.ggml.tokens"]), _WIDTH)
    ones("token_embd_norm" if architecture == "lfm2" else "output_norm")
    layers = {"gemma3": _sliding_window, "mamba": _recurrent, "lfm2": _hybrid}[architecture]
    layers(writer, tensor, ones, random)
    finish(writer)


def _sliding_window(writer: Any, tensor: Any, ones: Any, _random: np.random.Generator) -> None:
    """Most layers see only the last 32 tokens."""
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_sliding_window(32)
    writer.add_rope_freq_base(10000.0)
    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            ones(block + name)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(block + name, _HEAD)
        tensor(f"{block}attn_q", 4 * _HEAD, _WIDTH)
        tensor(f"{block}attn_k", 2 * _HEAD, _WIDTH)
        tensor(f"{block}attn_v", 2 * _HEAD, _WIDTH)
        tensor(f"{block}attn_output", _WIDTH, 4 * _HEAD)
        tensor(f"{block}ffn_gate", _FORWARD, _WIDTH)
        tensor(f"{block}ffn_up", _FORWARD, _WIDTH)
        tensor(f"{block}ffn_down", _WIDTH, _FORWARD)


def _hybrid(writer: Any, tensor: Any, ones: Any, _random: np.random.Generator) -> None:
    """Every other layer looks at all tokens, the others have a state that every token changes."""
    heads = [0 if layer % 2 == 0 else 2 for layer in range(_LAYERS)]
    writer.add_head_count(4)
    writer.add_head_count_kv(heads)
    writer.add_vocab_size(len(_vocabulary()["tokenizer.ggml.tokens"]))
    writer.add_shortconv_l_cache(3)
    writer.add_rope_freq_base(10000.0)
    for layer, keyed in enumerate(heads):
        block = f"blk.{layer}."
        ones(f"{block}attn_norm")
        ones(f"{block}ffn_norm")
        if keyed:
            for name in ("attn_q_norm", "attn_k_norm"):
                ones(block + name, _HEAD)
            tensor(f"{block}attn_q", 4 * _HEAD, _WIDTH)
            tensor(f"{block}attn_k", keyed * _HEAD, _WIDTH)
            tensor(f"{block}attn_v", keyed * _HEAD, _WIDTH)
            tensor(f"{block}attn_output", _WIDTH, 4 * _HEAD)
        else:
            tensor(f"{block}shortconv.conv", _WIDTH, 3)
            tensor(f"{block}shortconv.in_proj", 3 * _WIDTH, _WIDTH)
            tensor(f"{block}shortconv.out_proj", _WIDTH, _WIDTH)
        tensor(f"{block}ffn_gate", _FORWARD, _WIDTH)
        tensor(f"{block}ffn_up", _FORWARD, _WIDTH)
        tensor(f"{block}ffn_down", _WIDTH, _FORWARD)


def _recurrent(writer: Any, tensor: Any, ones: Any, random: np.random.Generator) -> None:
    """A state that every token changes, and that can't be cut back."""
    inner, state, kernel, rank = 2 * _WIDTH, 16, 4, 4
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)

    def plain(name: str, *shape: int) -> None:
        writer.add_tensor(name, -np.abs(random.standard_normal(shape) * 0.2).astype(np.float32))

    for layer in range(_LAYERS):
        block = f"blk.{layer}."
        ones(f"{block}attn_norm")
        tensor(f"{block}ssm_in", 2 * inner, _WIDTH)
        tensor(f"{block}ssm_conv1d", inner, kernel)
        plain(f"{block}ssm_conv1d.bias", inner)
        tensor(f"{block}ssm_x", rank + 2 * state, inner)
        tensor(f"{block}ssm_dt", inner, rank)
        plain(f"{block}ssm_dt.bias", inner)
        plain(f"{block}ssm_a", inner, state)
        plain(f"{block}ssm_d", inner)
        tensor(f"{block}ssm_out", _WIDTH, inner)
