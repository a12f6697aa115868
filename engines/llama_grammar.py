"""Grammars of a job: llguidance's Lark, checked token by token against the model's own vocabulary."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from citadel.errors import BadRequest, EdgeError
from engines.llama_native import tokenize_address

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engines.llama_native import Vocabulary


class Matcher:
    """Where one output is in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def take(self, token: int) -> bool:
        """Moves on by the token; False, and no move, where the grammar does not allow it."""
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def allowed(self) -> NDArray[np.bool_]:
        """For each token of the vocabulary, whether it may come next."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(mask, count=self._size, bitorder="little").view(np.bool_)

    @property
    def complete(self) -> bool:
        """Nothing but the end of the output may come next."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EdgeError(f"The output could not be held to its grammar: {self._matcher.get_error()}")


class Grammars:
    """Compiles the grammars of one model; its methods block and may be called from any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary: Vocabulary | None = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, source: str) -> Matcher:
        with self._lock:
            vocabulary = self._vocabulary
            if vocabulary is None:
                raise BadRequest("The model was unloaded")
            if self._tokenizer is None:
                self._tokenizer = _tokenizer_of(vocabulary)
            matcher = llguidance.LLMatcher(self._tokenizer, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
        if matcher.is_error():
            raise BadRequest(f"The grammar can't be used: {matcher.get_error()}")
        return Matcher(matcher, vocabulary.size)

    def close(self) -> None:
        """Waits for a compilation under way: llguidance reads the vocabulary, which is freed next."""
        with self._lock:
            self._vocabulary = None
            self._tokenizer = None


def _tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """llguidance marks a special token by a byte that no text has; it tokenizes with llama.cpp's own function."""
    make: Any = llguidance.LLTokenizer
    return make.from_llamacpp(
        tokens=[
            b"\xff" + vocabulary.piece(token) if vocabulary.is_special(token) else vocabulary.piece(token)
            for token in range(vocabulary.size)
        ],
        vocab_ptr=vocabulary.handle,
        tokenize_fptr=tokenize_address(),
        eos_token=sorted(vocabulary.ends),
        slices=None,
    )
