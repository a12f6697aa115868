"""A model's files, read without its weights: which they are, what they say of the model, whether they are complete."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from citadel.errors import LlmUnavailable
from engines.gguf_header import NotGguf
from engines.gguf_parts import MissingPart, known_table, part_number
from engines.llama_draft import DRAFTING
from engines.llama_log import VERSION
from engines.plan_model import Workload, describe, layers_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from citadel.engine import EngineSpec
    from engines.llama_options import Settings
    from engines.plan import Model

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""A file's sampling defaults, by our names."""


class Weights:
    """The file to load (the first part where it is split), and what it says of itself."""

    def __init__(self, spec: EngineSpec) -> None:
        """Raises `LlmUnavailable`."""
        self.path = find(spec)
        with _refusing(spec, self.path):
            self.table = known_table(self.path)
            self.layers = layers_of(self.table)
            self.context_length = self.table.count("context_length") or None

    def describe(self, spec: EngineSpec, settings: Settings) -> Model:
        """The model as the planner takes it."""
        context = settings.context
        workload = Workload(
            cells(spec, settings, self),
            spec.slots + DRAFTING * settings.draft,
            computed(spec, settings, self),
            context["type_k"],
            context["type_v"],
            kept=settings.prompt_cache if spec.task == "generate" else 0,
            sequences=spec.slots,
        )
        with _refusing(spec, self.path):
            return describe(self.table, workload)

    def check_complete(self, spec: EngineSpec) -> None:
        """Raises `LlmUnavailable` where a file is shorter than its header says."""
        with _refusing(spec, self.path):
            self.table.check_complete()

    @property
    def chat_template(self) -> str | None:
        template = self.table.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def fingerprint(self, engine: str) -> str:
        digest = hashlib.sha256(f"{self.path.name}\n{self.path.stat().st_size}\n".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(1 << 20))
        return f"{engine}-{VERSION}-{digest.hexdigest()[:8]}"

    def sampling_defaults(self) -> dict[str, float]:
        found = {ours: self.table.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}


def find(spec: EngineSpec) -> Path:
    if not spec.source.is_dir():
        return spec.source
    found = [
        path
        for path in sorted(spec.source.glob("*.gguf"))
        if not path.name.startswith("mmproj") and part_number(path.name) in (None, 1)
    ]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise LlmUnavailable(spec.model, f"{spec.source.name} must hold one GGUF model, and holds {names}")
    return found[0]


@contextmanager
def _refusing(spec: EngineSpec, path: Path) -> Generator[None]:
    """Says what is wrong with the files in the words of the port."""
    try:
        yield
    except MissingPart as error:
        raise LlmUnavailable(spec.model, str(error)) from None
    except NotGguf as error:
        raise LlmUnavailable(spec.model, f"{path.name} can't be loaded: {error}") from None
    except OSError as error:
        raise LlmUnavailable(spec.model, f"{path.name}: {error.strerror}") from None


def context_length(spec: EngineSpec, weights: Weights) -> int:
    """Tokens of one job, prompt and output."""
    length = spec.context_length or weights.context_length
    if not length:
        raise LlmUnavailable(spec.model, "the file names no context length; set context_length")
    # A model for embeddings may have learnt each position, and reads beyond its own memory after the last.
    return min(length, weights.context_length or length) if spec.task == "embed" else length


def cells(spec: EngineSpec, settings: Settings, weights: Weights) -> int:
    """Tokens that the cache holds, all slots together."""
    if spec.task == "embed":
        return computed(spec, settings, weights)
    return settings.cells or spec.slots * context_length(spec, weights)


def computed(spec: EngineSpec, settings: Settings, weights: Weights) -> int:
    """Tokens that are computed at once. A text to be embedded is computed whole, with others where there is room."""
    size: int = settings.context["n_ubatch"]
    return max(size, context_length(spec, weights)) if spec.task == "embed" else size
