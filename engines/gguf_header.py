"""Reads what a GGUF file says of itself (metadata, table of tensors), not its weights; milliseconds, no dependency.

The file is little-endian: magic, version, two counts, the key-value pairs, then name, shape, type and offset of each
tensor; the weights follow, aligned, in the table's order and without gaps. Long arrays (the vocabulary, its merges)
are walked over and not kept: they are most of the header, and whoever needs them opens the tokenizer.

A file comes from anywhere, so every count and size is checked against a bound before it is believed, and what
llama.cpp would refuse is refused here. The header is read, not mapped: a file that is cut while one looks at a mapping
of it ends the process.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_KEPT_ITEMS: Final = 1024
"""Arrays up to this length are kept: lists of layers are, vocabularies are not."""

_MOST_BYTES: Final = 128 << 20
"""Of a header; the largest published ones have some 20 MB."""
_MOST_PAIRS: Final = 1 << 16
_MOST_TENSORS: Final = 1 << 16
_LONGEST_NAME: Final = 63
"""Bytes of a tensor's name; llama.cpp keeps no more."""
_MOST_DIMENSIONS: Final = 4
_MOST_WEIGHTS: Final = 1 << 62
_CHUNK: Final = 1 << 20
_LENGTH: Final = struct.Struct("<Q")
"""How long a text is, before its bytes."""

BLOCKS: Final[dict[int, tuple[str, int, int]]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
    42: ("q2_0", 64, 18),
}
"""By ggml's number of a type: its name, the weights in a block, the bytes of a block."""


class NotGguf(ValueError):
    """The file is no GGUF, is cut off, or says of itself what can't be true."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A line of the table. `offset` in bytes from the file's beginning, `type` by its name in `BLOCKS`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` by the file's own keys; `end` is where the last tensor ends in a complete file."""

    metadata: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    end: int


class _Cursor:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data = bytearray()
        self.at = 0

    def take(self, code: str) -> Any:
        begin = self._advance(struct.calcsize(f"<{code}"))
        (value,) = struct.unpack_from(f"<{code}", self._data, begin)
        return value

    def text(self) -> str:
        length = self.take("Q")
        begin = self._advance(length)
        return self._data[begin : begin + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_scalar(kind))
        item_kind, count = self.take("I"), self.take("Q")
        if item_kind == _ARRAY:
            raise NotGguf("an array of arrays is not a value")
        if count <= _KEPT_ITEMS:
            return [self.value(item_kind) for _ in range(count)]
        self._skip(item_kind, count)
        return None

    def _skip(self, kind: int, count: int) -> None:
        if kind == _STRING:
            self._skip_texts(count)
        else:
            self._advance(count * struct.calcsize(f"<{_scalar(kind)}"))

    def _skip_texts(self, count: int) -> None:
        """Reading a header is mostly this loop, over a vocabulary and its merges."""
        at, data, length_at, size = self.at, self._data, _LENGTH.unpack_from, _LENGTH.size
        for _ in range(count):
            if at + size > len(data):
                self._fill(at + size)
            at += size + length_at(data, at)[0]
        self._fill(at)
        self.at = at

    def _advance(self, length: int) -> int:
        """Makes the next `length` bytes readable; returns where they begin."""
        begin, end = self.at, self.at + length
        self._fill(end)
        self.at = end
        return begin

    def _fill(self, end: int) -> None:
        """Makes the file readable up to `end`."""
        if end > _MOST_BYTES:
            raise NotGguf(f"the header is damaged: it has over {_MOST_BYTES >> 20} MB")
        while len(self._data) < end:
            chunk = self._file.read(_CHUNK)
            if not chunk:
                raise NotGguf("the file is cut off within its header")
            self._data += chunk


def parameters(tensors: Iterable[TensorEntry]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def read_header(path: Path) -> GgufHeader:
    """The header of `path`, whether or not the weights follow; `NotGguf` where it can't be read as one."""
    with path.open("rb", buffering=0) as file:
        if file.read(4) != _MAGIC:
            raise NotGguf("it is not a GGUF file")
        file.seek(0)
        return _read(_Cursor(file))


def _read(cursor: _Cursor) -> GgufHeader:
    cursor.take("4s")
    if (version := cursor.take("I")) not in (2, 3):
        raise NotGguf(f"GGUF version {version} is not supported")
    tensors, pairs = cursor.take("Q"), cursor.take("Q")
    if tensors > _MOST_TENSORS or pairs > _MOST_PAIRS:
        raise NotGguf(f"the header is damaged: it names {tensors} tensors and {pairs} values")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in metadata:
            raise NotGguf(f"the header is damaged: it has {shown(key)} twice")
        metadata[key] = cursor.value(cursor.take("I"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _CHUNK or alignment & (alignment - 1):
        raise NotGguf(f"the header is damaged: weights can't be aligned to {shown(alignment)}")
    table = [_entry(cursor) for _ in range(tensors)]
    return _laid_out(metadata, table, _align(cursor.at, alignment), alignment)


def _entry(cursor: _Cursor) -> TensorEntry:
    """A line of the table as the file has it: with the offset from where the weights begin."""
    name = cursor.text()
    if not 0 < len(name.encode()) <= _LONGEST_NAME:
        raise NotGguf(f"the header is damaged: a tensor is called {shown(name)}")
    dimensions = cursor.take("I")
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise NotGguf(f"the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.take("Q") for _ in range(dimensions))
    kind, offset = cursor.take("I"), cursor.take("Q")
    if kind not in BLOCKS:
        raise NotGguf(f"the tensor {name!r} is of the unknown type {kind}")
    type_name, block, size = BLOCKS[kind]
    weights = math.prod(shape)
    if not 0 < weights <= _MOST_WEIGHTS or shape[0] % block:
        raise NotGguf(f"the tensor {name!r} can't have the shape {list(shape)}")
    return TensorEntry(name, shape, type_name, offset, weights // block * size)


def _laid_out(metadata: Mapping[str, Any], table: list[TensorEntry], begin: int, alignment: int) -> GgufHeader:
    """Each tensor where the file has it; the offsets of the table say no more than that they are in its order."""
    at, names = 0, set[str]()
    tensors: list[TensorEntry] = []
    for tensor in table:
        if tensor.name in names:
            raise NotGguf(f"the header is damaged: it has the tensor {tensor.name!r} twice")
        names.add(tensor.name)
        if tensor.offset != at:
            raise NotGguf(f"the tensor {tensor.name!r} is said to be at {tensor.offset}, and must be at {at}")
        tensors.append(TensorEntry(tensor.name, tensor.shape, tensor.type, begin + at, tensor.size))
        at = _align(at + tensor.size, alignment)
    end = tensors[-1].offset + tensors[-1].size if tensors else begin
    return GgufHeader(metadata, tuple(tensors), end)


def _align(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def shown(value: Any) -> str:
    """A value of the file as an error may show it, however long it is."""
    return repr(value if not isinstance(value, str) else value[:_LONGEST_NAME])[: 2 * _LONGEST_NAME]


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise NotGguf(f"the header is damaged: there is no type of value {kind}")
    return _SCALARS[kind]
