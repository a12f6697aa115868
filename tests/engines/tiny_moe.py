"""A mixture of experts of a few MB with random weights in F32, for loads under several plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from small_llama import MERGES, SPECIAL, TEMPLATE, TOKENS

from tests.models import moe

WIDTH, LAYERS, FORWARD, HEAD, EXPERTS, USED, CONTEXT = 64, 4, 96, 16, 8, 2, 512


def write(path: Path) -> Path:
    random = np.random.default_rng(7)

    def matrix(writer: Any, name: str, shape: tuple[int, ...]) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.3).astype(np.float32))

    model = moe.Moe(WIDTH, LAYERS, FORWARD, 4, 2, HEAD, EXPERTS, USED, CONTEXT)
    return moe.write(path, model, moe.Vocabulary(TOKENS, MERGES, len(SPECIAL)), matrix, TEMPLATE)
