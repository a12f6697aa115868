"""A mixture of experts of a few MB with random weights in F32, for loads under several plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from small_llama import MERGES, SPECIAL, TEMPLATE, TOKENS

WIDTH, LAYERS, FORWARD, HEAD, EXPERTS, USED, CONTEXT = 64, 4, 96, 16, 8, 2, 512


def write(path: Path) -> Path:
    import gguf  # noqa: PLC0415 - the tests skip where it is not installed

    writer: Any = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_feed_forward_length(FORWARD)
    random = np.random.default_rng(7)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.3).astype(np.float32))

    def ones(name: str, size: int = WIDTH) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    tensor("token_embd", len(TOKENS), WIDTH)
    ones("output_norm")
    tensor("output", len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            ones(block + name)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(block + name, HEAD)
        tensor(f"{block}attn_q", 4 * HEAD, WIDTH)
        tensor(f"{block}attn_k", 2 * HEAD, WIDTH)
        tensor(f"{block}attn_v", 2 * HEAD, WIDTH)
        tensor(f"{block}attn_output", WIDTH, 4 * HEAD)
        tensor(f"{block}ffn_gate_inp", EXPERTS, WIDTH)
        tensor(f"{block}ffn_gate_exps", EXPERTS, FORWARD, WIDTH)
        tensor(f"{block}ffn_up_exps", EXPERTS, FORWARD, WIDTH)
        tensor(f"{block}ffn_down_exps", EXPERTS, WIDTH, FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
