"""The tokenizer of a checkpoint folder, read by hand, against folders of every age."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engines.hf_tokenizer import _BYTE_ALPHABET, HfTokenizer

SPECIAL = ["<s>", "</s>"]


def byte_level(folder: Path, **config: Any) -> Path:
    """GPT-2's way: a token is a string of characters that stand for bytes."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *_BYTE_ALPHABET, "he", "hel"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("he", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _write(folder, tokenizer, config)


def sentence_piece(folder: Path, **config: Any) -> Path:
    """SentencePiece's way: a mark for a space, and tokens for the bytes of what has none."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "hi", "\u2581hi"]
    merges = [("h", "i"), ("\u2581", "hi")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _write(folder, tokenizer, config)


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder


KINDS = pytest.mark.parametrize("make", [byte_level, sentence_piece])


@KINDS
def test_what_is_encoded_is_decoded(make: Any, tmp_path: Path):
    tokenizer = HfTokenizer(make(tmp_path))
    for text in ("hi", "hello hi", "naïve 漢字 🦜", "a\n\tb", "</s>hi<s></s>", " hi ", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@KINDS
def test_special_tokens_are_parsed_and_nothing_is_added(make: Any, tmp_path: Path):
    tokenizer = HfTokenizer(make(tmp_path))
    assert tokenizer.encode("<s></s>") == [0, 1]
    assert 0 not in tokenizer.encode("hi")


@KINDS
def test_the_bytes_of_the_tokens_joined_are_the_bytes_of_the_text(make: Any, tmp_path: Path):
    tokenizer = HfTokenizer(make(tmp_path))
    text = "hi 漢 🦜</s>"
    token_ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
    assert len(tokenizer.token_bytes(token_ids[-2])) == 1, "a part of the bird"


def test_a_token_id_without_a_token_has_no_bytes(tmp_path: Path):
    tokenizer = HfTokenizer(byte_level(tmp_path))
    assert tokenizer.token_bytes(tokenizer.vocabulary_size) == b""


@KINDS
def test_bytes_that_are_no_utf_8_are_replaced(make: Any, tmp_path: Path):
    tokenizer = HfTokenizer(make(tmp_path))
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("🦜")[:2])


def test_token_ids_are_below_the_size_of_the_vocabulary(tmp_path: Path):
    folder = byte_level(tmp_path, added_tokens_decoder={"300": {"content": "<think>"}})
    tokenizer = HfTokenizer(folder)
    assert tokenizer.encode("<think>") == [tokenizer.vocabulary_size - 1]
    assert tokenizer.token_bytes(tokenizer.vocabulary_size - 1) == b"<think>"


def test_a_length_to_cut_to_is_not_kept(tmp_path: Path):
    folder = byte_level(tmp_path)
    cutting = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cutting.enable_truncation(4)
    cutting.enable_padding(length=100)
    cutting.save(str(folder / "tokenizer.json"))
    assert len(HfTokenizer(folder).encode("x" * 50)) == 50


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"model_type": "unknown"}, None),
        (None, None),
    ],
)
def test_the_context_length_is_the_configurations(tmp_path: Path, config: dict[str, Any] | None, length: int | None):
    folder = byte_level(tmp_path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    assert HfTokenizer(folder).context_length == length


@pytest.mark.parametrize(
    ("files", "config", "template"),
    [
        ({}, {}, None),
        ({}, {"chat_template": "in the configuration"}, "in the configuration"),
        ({"chat_template.json": '{"chat_template": "in json"}'}, {"chat_template": "older"}, "in json"),
        ({"chat_template.jinja": "in jinja ä"}, {"chat_template": "older"}, "in jinja ä"),
        (
            {},
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            "d",
        ),
        ({}, {"chat_template": [{"name": "rag", "template": "r"}]}, "r"),
    ],
)
def test_the_template_is_found_in_each_of_its_places(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], template: str | None
):
    folder = byte_level(tmp_path, **config)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    assert HfTokenizer(folder).chat_template == template


def test_special_tokens_are_texts_wherever_they_are_kept(tmp_path: Path):
    folder = byte_level(tmp_path, eos_token={"content": "</s>", "lstrip": False}, pad_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "older"}))
    assert HfTokenizer(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_opening_one_imports_neither_torch_nor_transformers(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from engines.hf_tokenizer import HfTokenizer;"
        "HfTokenizer(Path(sys.argv[1])); print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    folder = str(byte_level(tmp_path))
    said = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_a_folder_without_a_fast_tokenizer_is_opened_by_transformers(tmp_path: Path):
    pytest.importorskip("transformers")
    vocabulary = {token: number for number, token in enumerate([*_BYTE_ALPHABET, "<|endoftext|>", "he"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello 漢<|endoftext|>")) == "hello 漢<|endoftext|>"
    assert tokenizer.encode("<|endoftext|>") == [256]
