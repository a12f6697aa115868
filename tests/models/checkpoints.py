"""Checkpoints made of the tiny one: its architecture with other weights, embeddings tied or not, and broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.models.export import CHECKPOINT

Tensor = tuple[str, list[int], bytes]
"""Type, shape and bytes."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    raw = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        found[name] = tensor["dtype"], tensor["shape"], raw[begin + start : begin + end]
    return found


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    )


def original(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def reordered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Another model: the layers in reverse order, and each token with the embedding of the one five before it."""
    last = max(int(parts[2]) for name in tensors if (parts := name.split("."))[1] == "layers")
    found: dict[str, Tensor] = {}
    for name, (dtype, shape, data) in tensors.items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(last - int(parts[2]))
        if name == "model.embed_tokens.weight":
            row = len(data) // shape[0]
            found[name] = dtype, shape, data[-5 * row :] + data[: -5 * row]
        else:
            found[".".join(parts)] = dtype, shape, data
    return found


def make(
    folder: Path,
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = original,
    *,
    tied: bool = False,
    source: Path = CHECKPOINT,
) -> Path:
    """A checkpoint folder with `change` made to the weights of `source`; `tied` drops an output head of its own."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    weights = read_weights(source)
    if tied:
        weights.pop("lm_head.weight", None)
    write_weights(folder, change(weights))
    return folder


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
