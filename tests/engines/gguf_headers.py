"""GGUF headers without weights, and what a hostile hand would make of them; written from the format's description."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engines.gguf_header import BLOCKS

TYPES = {name: (number, block, size) for number, (name, block, size) in BLOCKS.items()}
ALIGNMENT = 32


class Told(NamedTuple):
    """A tensor as a header tells of it. `offset` None is the right one."""

    name: str
    shape: Sequence[int]
    type: str | int = "f32"
    offset: int | None = None


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A typed value: text, truth, fraction, whole number, or a list of one of them."""
    if isinstance(item, list):
        parts = [value(each) for each in item]
        return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(parts)) + b"".join(p[4:] for p in parts)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<II", 4, item) if 0 <= item < 1 << 32 else struct.pack("<Iq", 11, item)


def size_of(tensor: Told) -> int:
    _, block, size = TYPES[tensor.type] if isinstance(tensor.type, str) else (0, 1, 4)
    return math.prod(tensor.shape) // block * size


def header(metadata: Mapping[str, Any], tensors: Sequence[Told] = (), *, count: int | None = None) -> bytes:
    """`count` lies about how many tensors there are. It ends where the weights would begin."""
    pairs = b"".join(text(key) + value(item) for key, item in metadata.items())
    table, at = b"", 0
    for tensor in tensors:
        number = TYPES[tensor.type][0] if isinstance(tensor.type, str) else tensor.type
        offset = at if tensor.offset is None else tensor.offset
        table += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        table += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", number, offset)
        at = -(-(at + size_of(tensor)) // ALIGNMENT) * ALIGNMENT
    told = len(tensors) if count is None else count
    head = b"GGUF" + struct.pack("<IQQ", 3, told, len(metadata)) + pairs + table
    return head + bytes(-len(head) % ALIGNMENT)
