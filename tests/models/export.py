"""Makes the model's files of what `train` left: `python -m tests.models.export TRAINED [FOLDER]`.

FOLDER becomes a checkpoint folder for vLLM, `tiny.gguf` beside it a file for llama.cpp: the same weights, rounded to
bfloat16, the same tokenizer and template.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from . import tokenizer as tokens
from .generate import END, TEMPLATE
from .gguf_file import finish
from .train import new_model

HERE: Final = Path(__file__).parent
CHECKPOINT: Final = HERE / "tiny"
GGUF: Final = HERE / "tiny.gguf"

_PAD: Final = tokens.SPECIAL[0]
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_REST: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end, padding = tokenizer.token_to_id(END), tokenizer.token_to_id(_PAD)
    model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id = end, padding, None
    model.generation_config = GenerationConfig(eos_token_id=[end, padding], pad_token_id=padding)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=_PAD,
        model_max_length=_config(model).max_position_embeddings,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_gguf(model: Qwen3ForCausalLM, tokenizer: Tokenizer, file: Path) -> None:
    """Matrices as bfloat16; llama.cpp wants vectors as float32."""
    writer = gguf.GGUFWriter(file, "qwen3")
    _write_settings(writer, _config(model))
    _write_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        value = tensor.float()
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value.numpy())
        else:
            bits = value.bfloat16().view(torch.uint16).numpy()
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)


def _config(model: Qwen3ForCausalLM) -> Qwen3Config:
    config: Any = model.config
    return config


def _write_settings(writer: gguf.GGUFWriter, config: Qwen3Config) -> None:
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    words = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([_token_type(word) for word in words])
    writer.add_token_merges(tokens.merges(tokenizer))
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    writer.add_pad_token_id(tokenizer.token_to_id(_PAD))
    writer.add_bos_token_id(tokenizer.token_to_id(_PAD))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _token_type(word: str) -> gguf.TokenType:
    if word in tokens.SPECIAL:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.USER_DEFINED if word in tokens.MARKERS else gguf.TokenType.NORMAL


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _REST:
        return f"{_REST[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.weight"


def main(trained: Path, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    model = new_model(tokenizer.get_vocab_size())
    model.load_state_dict(torch.load(trained / "checkpoint.pt")["model"])
    model = model.to(torch.bfloat16)
    write_checkpoint(model, tokenizer, folder)
    write_gguf(model, tokenizer, folder.with_suffix(".gguf"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else CHECKPOINT)
