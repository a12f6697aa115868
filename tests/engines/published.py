"""Headers of published architectures, without their weights: the shapes and types of the files that people run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf_headers import Told, header


def deepseek_v3() -> bytes:
    """671B: 61 layers, the first three dense, then 256 experts, 8 of them used, and a shared one; Q4_K_M."""
    width, layers, latent, rope, heads = 7168, 61, 512, 64, 128
    metadata = _metadata("deepseek2", layers, width, heads, 1, forward=18432, context=163_840) | {
        "deepseek2.attention.key_length": latent + rope,
        "deepseek2.attention.value_length": latent,
        "deepseek2.attention.key_length_mla": 192,
        "deepseek2.attention.value_length_mla": 128,
        "deepseek2.attention.kv_lora_rank": latent,
        "deepseek2.expert_count": 256,
        "deepseek2.expert_used_count": 8,
        "deepseek2.expert_feed_forward_length": 2048,
        "deepseek2.leading_dense_block_count": 3,
        "deepseek2.vocab_size": 129_280,
    }
    return header(metadata, [*_ends(width, 129_280), *_deepseek_layers(width, layers, latent, rope, heads)])


def _deepseek_layers(width: int, layers: int, latent: int, rope: int, heads: int) -> Iterator[Told]:
    for layer in range(layers):
        block = f"blk.{layer}."
        yield from _norms(block, width, "attn_norm", "ffn_norm")
        yield from _norms(block, 1536, "attn_q_a_norm")
        yield from _norms(block, latent, "attn_kv_a_norm")
        yield Told(f"{block}attn_q_a.weight", (width, 1536), "q4_K")
        yield Told(f"{block}attn_q_b.weight", (1536, heads * 192), "q4_K")
        yield Told(f"{block}attn_kv_a_mqa.weight", (width, latent + rope), "q8_0")
        yield Told(f"{block}attn_k_b.weight", (128, latent, heads), "q8_0")
        yield Told(f"{block}attn_v_b.weight", (latent, 128, heads), "q8_0")
        yield Told(f"{block}attn_output.weight", (heads * 128, width), "q4_K")
        if layer < 3:
            yield from _forward(block, width, 18432, "q4_K", _more(layer, layers))
            continue
        yield Told(f"{block}ffn_gate_inp.weight", (width, 256))
        yield Told(f"{block}exp_probs_b.bias", (256,))
        yield from _experts(block, width, 2048, 256, "q4_K", _more(layer, layers))
        yield from _forward(block, width, 2048, "q4_K", _more(layer, layers), "_shexp")


def qwen3_235b() -> bytes:
    """235B-A22B: 94 layers of 128 experts, 8 of them used; Q4_K_M."""
    width, layers = 4096, 94
    metadata = _metadata("qwen3moe", layers, width, 64, 4, forward=12288, context=40_960) | {
        "qwen3moe.attention.key_length": 128,
        "qwen3moe.attention.value_length": 128,
        "qwen3moe.expert_count": 128,
        "qwen3moe.expert_used_count": 8,
        "qwen3moe.expert_feed_forward_length": 1536,
    }
    tensors = [*_ends(width, 151_936)]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors += _attention(block, width, 64 * 128, 4 * 128, "q4_K", _more(layer, layers))
        tensors += _norms(block, 128, "attn_q_norm", "attn_k_norm")
        tensors += [Told(f"{block}ffn_gate_inp.weight", (width, 128))]
        tensors += _experts(block, width, 1536, 128, "q4_K", _more(layer, layers))
    return header(metadata, tensors)


def gpt_oss_120b() -> bytes:
    """117B: 36 layers of 128 experts in MXFP4, 4 of them used, with biases."""
    width, layers = 2880, 36
    metadata = _metadata("gpt-oss", layers, width, 64, 8, forward=2880, context=131_072) | {
        "gpt-oss.attention.key_length": 64,
        "gpt-oss.attention.value_length": 64,
        "gpt-oss.attention.sliding_window": 128,
        "gpt-oss.expert_count": 128,
        "gpt-oss.expert_used_count": 4,
        "gpt-oss.expert_feed_forward_length": 2880,
    }
    tensors = [*_ends(width, 201_088, "q8_0", "q8_0")]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors += _attention(block, width, 64 * 64, 8 * 64, "q8_0", "q8_0")
        tensors += [Told(f"{block}attn_sinks.weight", (64,)), Told(f"{block}ffn_gate_inp.weight", (width, 128))]
        tensors += _experts(block, width, 2880, 128, "mxfp4", "mxfp4")
        tensors += [Told(f"{block}ffn_{name}_exps.bias", (width, 128)) for name in ("gate", "up", "down")]
    return header(metadata, tensors)


def dense_70b() -> bytes:
    """70B: 80 layers, no experts; Q4_K_M."""
    width, layers = 8192, 80
    metadata = _metadata("llama", layers, width, 64, 8, forward=28672, context=131_072)
    tensors = [*_ends(width, 128_256)]
    for layer in range(layers):
        block = f"blk.{layer}."
        tensors += _attention(block, width, 8192, 1024, "q4_K", "q6_K" if _more(layer, layers) == "q6_K" else "q5_K")
        tensors += _forward(block, width, 28672, "q4_K", _more(layer, layers))
    return header(metadata, tensors)


PUBLISHED = {
    "deepseek-v3-671b": deepseek_v3,
    "qwen3-235b-a22b": qwen3_235b,
    "gpt-oss-120b": gpt_oss_120b,
    "dense-70b": dense_70b,
}


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(PUBLISHED[name]())
    return path


def _metadata(
    architecture: str, layers: int, width: int, heads: int, heads_kv: int, *, forward: int, context: int
) -> dict[str, Any]:
    own = {
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": forward,
        "context_length": context,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
    }
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def _more(layer: int, layers: int) -> str:
    """The type that Q4_K_M has for the matrices that matter more: six bits in half of the layers."""
    eighth = layers // 8
    return "q6_K" if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2 else "q4_K"


def _ends(width: int, vocabulary: int, table: str = "q4_K", output: str = "q6_K") -> list[Told]:
    return [
        Told("token_embd.weight", (width, vocabulary), table),
        Told("output_norm.weight", (width,)),
        Told("output.weight", (width, vocabulary), output),
    ]


def _norms(block: str, width: int, *names: str) -> list[Told]:
    return [Told(f"{block}{name}.weight", (width,)) for name in names]


def _attention(block: str, width: int, queries: int, keys: int, kind: str, values: str) -> list[Told]:
    return [
        *_norms(block, width, "attn_norm", "ffn_norm"),
        Told(f"{block}attn_q.weight", (width, queries), kind),
        Told(f"{block}attn_k.weight", (width, keys), kind),
        Told(f"{block}attn_v.weight", (width, keys), values),
        Told(f"{block}attn_output.weight", (queries, width), kind),
    ]


def _forward(block: str, width: int, inner: int, kind: str, down: str, suffix: str = "") -> list[Told]:
    return [
        Told(f"{block}ffn_gate{suffix}.weight", (width, inner), kind),
        Told(f"{block}ffn_up{suffix}.weight", (width, inner), kind),
        Told(f"{block}ffn_down{suffix}.weight", (inner, width), down),
    ]


def _experts(block: str, width: int, inner: int, count: int, kind: str, down: str) -> list[Told]:
    return [
        Told(f"{block}ffn_gate_exps.weight", (width, inner, count), kind),
        Told(f"{block}ffn_up_exps.weight", (width, inner, count), kind),
        Told(f"{block}ffn_down_exps.weight", (inner, width, count), down),
    ]
