"""What all engines that make embeddings share: what they refuse of a job, and vectors of unit length."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from citadel.errors import BadRequest, EdgeError, InputTooLong

if TYPE_CHECKING:
    from citadel.engine import EmbedJob, Vector


def check(job: EmbedJob, context_length: int, vocabulary_size: int) -> None:
    """Raises `BadRequest` for a text that is empty or too long, or has a token out of the vocabulary."""
    if not job.texts:
        raise BadRequest("input: it is empty", param="input")
    for index, text in enumerate(job.texts):
        param = f"input[{index}]"
        if not text:
            raise BadRequest(f"{param}: it is empty", param=param)
        if min(text) < 0 or max(text) >= vocabulary_size:
            raise BadRequest(f"{param}: token ids of this model are below {vocabulary_size}", param=param)
        if len(text) > context_length:
            raise InputTooLong(context_length, len(text), param)


def unit(values: Any) -> Vector:
    """`values`, numbers in one row of any array type, scaled to length 1. Raises `EdgeError` where that can't be."""
    row = np.asarray(values, np.float64)
    length = float(np.linalg.norm(row))
    if not 0 < length < float("inf"):
        raise EdgeError("The model's vector for a text has no direction")
    return array("f", (row / length).astype(np.float32).tobytes())
