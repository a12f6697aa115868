"""Text and tokens: the tokenizer of the port, and the text of an output as it grows."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from citadel.errors import LlmUnavailable
from engines.llama_files import Weights
from engines.llama_native import Model, NativeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from citadel.engine import EngineSpec


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

    def encode(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._vocabulary.piece(token) for token in token_ids).decode("utf-8", "replace")


class Text:
    """Turns the bytes of an output's tokens into text: a character that is cut by a token's end waits for the rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)
