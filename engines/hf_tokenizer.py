"""The tokenizer of a Hugging Face checkpoint folder, read from its files with the `tokenizers` package alone.

transformers would do it too, at the price of importing torch into a process that may never load this model; it is
asked only where a folder has no `tokenizer.json`, and then writes one for us to read.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (tokenizers has no types for some results, transformers for most of its arguments)

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")

_WORD_MARK: Final = "\u2581"
"""What SentencePiece vocabularies write for a space."""


class HfTokenizer:
    """Implements the port's `Tokenizer`. Reads everything when it is made, so the folder may go away after."""

    def __init__(self, folder: Path) -> None:
        self._config = read_json(folder / "tokenizer_config.json")
        self._tokenizer = _open(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._context_length = context_length(read_json(folder / "config.json"))
        self._chat_template = _chat_template(folder, self._config)
        self._special_tokens = _special_tokens(folder, self._config)
        self._known = _register_specials(self._tokenizer, self._config)
        self._byte_level = _BYTE_ALPHABET if _is_byte_level(self._tokenizer) else None
        self._vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special_tokens

    @property
    def context_length(self) -> int | None:
        return self._context_length

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; it may begin or end inside a character, which `decode` could not show."""
        if (known := self._known.get(token_id)) is not None:
            return known
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level is not None:
            return b"".join(self._byte_level.get(character) or character.encode() for character in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_WORD_MARK, " ").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    return json.loads(path.read_bytes()) if path.is_file() else {}


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens the model was made for, from its `config.json`; a multimodal one keeps it with its text model."""
    text_config: Mapping[str, Any] = config.get("text_config") or {}
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        for place in (config, text_config):
            if isinstance(length := place.get(key), int):
                return length
    return None


def _open(folder: Path) -> Tokenizer:
    if (file := folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # noqa: PLC0415  (heavy, and seldom needed)

    slow: Any = AutoTokenizer.from_pretrained(str(folder))
    with tempfile.TemporaryDirectory() as made:
        slow.save_pretrained(made)
        return Tokenizer.from_file(str(Path(made) / "tokenizer.json"))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template, from the places it has been kept in over the years, the newest first."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template: Any = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        entries: list[dict[str, str]] = template
        named = {entry["name"]: entry["template"] for entry in entries}
        return named.get("default") or next(iter(named.values()), None)
    return template


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    places = (config, read_json(folder / "special_tokens_map.json"))
    found: dict[str, str] = {}
    for name in _NAMES:
        for place in places:
            value = place.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _register_specials(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[int, bytes]:
    """Added tokens by id, as bytes. Older checkpoints declare some of them outside `tokenizer.json`."""
    declared: Mapping[str, Mapping[str, Any]] = config.get("added_tokens_decoder") or {}
    missing = [
        AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
            special=entry.get("special", False),
        )
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0]))
        if tokenizer.token_to_id(entry["content"]) is None
    ]
    if missing:
        tokenizer.add_tokens(missing)
    return {token_id: token.content.encode() for token_id, token in tokenizer.get_added_tokens_decoder().items()}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its tokens are bytes in disguise: true of GPT-2's heirs, false of SentencePiece's."""
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps: list[dict[str, Any]] = decoder.get("decoders") or [decoder]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _byte_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level vocabularies: itself if it prints, else one above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    alphabet.update({chr(256 + place): bytes([byte]) for place, byte in enumerate(others)})
    return alphabet


_BYTE_ALPHABET: Final = _byte_alphabet()
