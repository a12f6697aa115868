"""A GGUF file of a bert with a few thousand weights, as embedding models are: no cache, learnt positions, two ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf_file import finish

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "ran", "far", "away", "s", "a")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENS = (*SPECIAL, *(f"▁{word}" for word in WORDS), *(chr(letter) for letter in range(ord("a"), ord("z") + 1)))
WIDTH, HEADS, INNER, LAYERS, CONTEXT = 32, 2, 64, 2, 64


def write(path: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.CLS) -> Path:
    writer: Any = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_type_count(2)
    for name, token in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("eos", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(token)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (CONTEXT, WIDTH),
    }
    norms = ["token_embd_norm"]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        norms += [f"{block}attn_output_norm", f"{block}layer_output_norm"]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes |= {f"{block}{name}.weight": (WIDTH, WIDTH), f"{block}{name}.bias": (WIDTH,)}
        shapes |= {f"{block}ffn_up.weight": (INNER, WIDTH), f"{block}ffn_up.bias": (INNER,)}
        shapes |= {f"{block}ffn_down.weight": (WIDTH, INNER), f"{block}ffn_down.bias": (WIDTH,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(WIDTH, np.float32))
    finish(writer)
    return path
