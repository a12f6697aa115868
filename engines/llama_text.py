"""Text and tokens: the tokenizer of the port, and the text of an output as it grows."""

from __future__ import annotations

import codecs
from functools import cached_property
from typing import TYPE_CHECKING, Final

from citadel.errors import LlmUnavailable
from engines.llama_chunks import CHUNK_BYTES, Special, chunks, cuts_of
from engines.llama_files import Weights
from engines.llama_native import Model, NativeError, lib

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from citadel.engine import EngineSpec
    from engines.llama_native import Vocabulary

_LOOKED_FOR: Final = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_TAKES_WHITE_SPACE: Final = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP


class Tokenizer:
    """Owns a load of the vocabulary alone, so that it outlives the engine; freed when nobody holds it."""

    def __init__(self, spec: EngineSpec) -> None:
        weights = Weights(spec)
        try:
            self._model = Model.load(weights.path, {"vocab_only": True})
            self._vocabulary = self._model.vocabulary
        except NativeError as error:
            raise LlmUnavailable(spec.model, str(error)) from None
        self.chat_template = weights.chat_template
        self.context_length = weights.context_length
        self.vocabulary_size = self._vocabulary.size
        self.special_tokens = {name: self.decode([token]) for name, token in self._vocabulary.special().items()}

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        if len(data) <= CHUNK_BYTES or self._cuts is None:
            return self._vocabulary.tokenize(data, add_special=add_special)
        tokens = [token for part in chunks(data, self._cuts) for token in self._vocabulary.tokenize(part)]
        first, last = self._around if add_special else ([], [])
        return [*first, *tokens, *last]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """What the file has put before and behind a text."""
        bare, whole = self._vocabulary.tokenize(b"a"), self._vocabulary.tokenize(b"a", add_special=True)
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    @cached_property
    def _cuts(self) -> re.Pattern[bytes] | None:
        return cuts_of(specials(self._vocabulary))

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._vocabulary.piece(token) for token in token_ids).decode("utf-8", "replace")


def specials(vocabulary: Vocabulary) -> list[Special]:
    """The tokens that llama.cpp finds in a text by their own texts."""
    found: list[Special] = []
    for token in range(vocabulary.size):
        kind = lib.llama_vocab_get_attr(vocabulary.handle, token)
        if kind & _LOOKED_FOR and (text := lib.llama_vocab_get_text(vocabulary.handle, token)):
            cuts = bool(kind & lib.LLAMA_TOKEN_ATTR_CONTROL) and not kind & _TAKES_WHITE_SPACE
            found.append(Special(text, cuts))
    return found


class Text:
    """Turns the bytes of an output's tokens into text: a character that is cut by a token's end waits for the rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)
