"""Texts to be embedded -> their tokens, each as the model reads a text that stands alone."""

from __future__ import annotations

from collections.abc import Sequence

from citadel.engine import Tokenizer
from citadel.errors import BadRequest, InputTooLong
from citadel.messages import EmbedRequest


def tokens(request: EmbedRequest, tokenizer: Tokenizer, limit: int | None) -> list[Sequence[int]]:
    """Of each input. `limit`: the model's context in tokens, where it is known. Raises BadRequest, InputTooLong."""
    found: list[Sequence[int]] = []
    for index, given in enumerate(request.inputs):
        param = f"input[{index}]"
        one = tokenizer.encode(given, add_special=True) if isinstance(given, str) else given
        if not one:
            raise BadRequest(f"{param}: it is empty", param=param)
        if max(one) >= tokenizer.vocabulary_size:
            raise BadRequest(f"{param}: token ids of this model are below {tokenizer.vocabulary_size}", param=param)
        if limit is not None and len(one) > limit:
            raise InputTooLong(limit, len(one), param)
        found.append(one)
    return found
