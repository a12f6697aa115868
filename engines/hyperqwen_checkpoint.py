"""Which checkpoints can take each other's place in a running vLLM, and what one answered when it was loaded.

Told from the files alone, without vLLM. A running vLLM keeps its model's shape, its tokenizer (which turns its output
into text and stands behind grammars) and its end-of-sequence tokens: of two checkpoints that are to be swapped in
place all of that must be the same. Only the weights may differ, and what we read ourselves: the chat template and the
sampling defaults.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from citadel.engine import EngineSpec
from engines.gguf_weights import checkpoint_folder, is_ready
from engines.hf_tokenizer import read_json

_WEIGHTS: Final = ".safetensors"
_OWN_FORMATS: Final = ("auto", "safetensors")
"""Values of `load_format` that vLLM's reload in place knows, of those that read a checkpoint as it is."""

_CONFIG_NOTES: Final = ("_name_or_path", "transformers_version")
_TOKENIZER_NOTES: Final = ("chat_template", "name_or_path", "padding", "truncation")
_READ: Final = ("*.json", "*.model", "*.py", "*.tiktoken", "merges.txt", "vocab.txt")
_UNREAD: Final = ("*.index.json", "chat_template.json")
"""Of the former, those of which nothing matters: where the weights are, and what we read ourselves."""


def swap_key(spec: EngineSpec) -> str | None:
    """Equal for two models of which each can take the other's engine over; None for one that can't. Blocks."""
    try:
        folder = spec.source if spec.source.is_dir() else checkpoint_folder(spec.source, spec.cache_dir)
        if spec.task != "generate" or not is_ready(folder) or not _reloads(spec.options):
            return None
        settings = [spec.mode, spec.slots, spec.context_length, spec.memory_bytes, spec.options]
        return _hash([settings, _architecture(folder, identity(folder))])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # what is wrong is told by a load
        return None


def identity(folder: Path) -> str:
    """Another one whenever a file of the checkpoint was changed or exchanged. Blocks."""
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return _hash([str(folder.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]])


class Answers:
    """What each checkpoint answered to the first question after it was loaded afresh; kept in files of `folder`.

    `engine` names what computes: another version of vLLM may answer otherwise. Blocks.
    """

    def __init__(self, folder: Path, engine: str) -> None:
        self._folder = folder
        self._engine = engine

    def read(self, key: str, identity: str) -> list[float] | None:
        with contextlib.suppress(OSError, ValueError):
            answer: Any = json.loads(self._file(key, identity).read_bytes())
            if isinstance(answer, list):
                return cast("list[float]", answer)
        return None

    def write(self, key: str, identity: str, answer: Sequence[float]) -> None:
        file = self._file(key, identity)
        self._folder.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(list(answer)), encoding="ascii")
        made.replace(file)

    def _file(self, key: str, identity: str) -> Path:
        return self._folder / f"{_hash([self._engine, key, identity])[:32]}.json"


def _reloads(options: Mapping[str, Any]) -> bool:
    """Whether what the owner has vLLM do beside running the model leaves a reload right."""
    draft: Any = options.get("speculative_config") or {}
    workers = [options.get(f"{how}_parallel_size", 1) for how in ("tensor", "pipeline", "data")]
    return (
        options.get("load_format", "auto") in _OWN_FORMATS
        and "worker_extension_cls" not in options
        and workers == [1, 1, 1]  # over several of them it was never tried
        and not options.get("enable_lora")
        and draft.get("method", "ngram") == "ngram"  # a draft model would go on guessing for the old one
    )


@lru_cache(maxsize=32)
def _architecture(folder: Path, _identity: str) -> str:
    """All that must be the same. Kept for as long as the files are: a tokenizer can take a second to be compared."""
    return _hash([_texts(folder), _tensors(folder)])


def _texts(folder: Path) -> dict[str, Any]:
    """What is in the files beside the weights, as far as a running vLLM depends on it."""
    found: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        if not any(file.match(name) for name in _READ) or any(file.match(name) for name in _UNREAD):
            continue
        match file.name:
            case "config.json":
                found[file.name] = _without(read_json(file), _CONFIG_NOTES)
            case "tokenizer.json" | "tokenizer_config.json":
                found[file.name] = _without(read_json(file), _TOKENIZER_NOTES)
            case "generation_config.json":
                continue
            case _:
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    ends: Any = read_json(folder / "generation_config.json").get("eos_token_id")
    found["ends"] = sorted(cast("list[Any]", ends) if isinstance(ends, list) else [ends])
    return found


def _without(settings: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in notes}


def _tensors(folder: Path) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of every tensor. Raises ValueError for a file that is cut, or is none of these."""
    found: list[tuple[str, str, list[int]]] = []
    for file in folder.glob(f"*{_WEIGHTS}"):
        tensors, begin = header(file)
        found += [(name, str(tensor["dtype"]), list(tensor["shape"])) for name, tensor in tensors.items()]
        if begin + max(tensor["data_offsets"][1] for tensor in tensors.values()) != file.stat().st_size:
            raise ValueError(f"{file} is not as long as its tensors")
    return sorted(found)


def header(file: Path) -> tuple[Mapping[str, Any], int]:
    """Of a safetensors file: the tensors by name, and where their bytes begin."""
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        if begin > file.stat().st_size:
            raise ValueError(f"{file} ends in its header")
        found: Any = json.loads(opened.read(begin - 8))
    if not isinstance(found, dict):
        raise ValueError(f"{file} has no table of tensors")  # noqa: TRY004 - of a file's content
    tensors = cast("dict[str, Any]", found)
    return {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}, begin


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
