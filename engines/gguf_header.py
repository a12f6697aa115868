"""Reads what a GGUF file says of itself (metadata, tensor shapes), not its weights; milliseconds, and no dependency.

The file is little-endian: magic, version, two counts, the key-value pairs, then name, shape, type and offset of each
tensor. Long arrays (the vocabulary, its merges) are walked over and not kept: they are most of the header, and
whoever needs them opens the tokenizer.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_KEPT_ITEMS: Final = 1024
"""Arrays up to this length are kept: lists of layers are, vocabularies are not."""


class NotGguf(ValueError):
    """The file is no GGUF, or is cut off."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata` by the file's own keys, and how many weights its tensors hold."""

    metadata: Mapping[str, Any]
    parameters: int

    def of_model(self, key: str) -> Any:
        """A value whose key begins with the architecture's name, such as `block_count`; None where there is none."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.take("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) < length:
            raise NotGguf("the file is cut off")
        self._at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        item_kind, count = self.take("I"), self.take("Q")
        if count <= _KEPT_ITEMS:
            return [self.value(item_kind) for _ in range(count)]
        self._skip(item_kind, count)
        return None

    def _skip(self, kind: int, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                length = self.take("Q")
                self._at += length
        else:
            self._at += count * struct.calcsize(f"<{_SCALARS[kind]}")


def read_header(path: Path) -> GgufHeader:
    """The header of `path`; `NotGguf` where it can't be read as one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != _MAGIC:
                raise NotGguf(f"{path.name} is not a GGUF file")
            return _read(_Cursor(data))
    except (struct.error, KeyError) as error:
        raise NotGguf(f"{path.name} is damaged: {error}") from error
    except ValueError as error:  # an empty file can't be mapped
        raise NotGguf(str(error)) from error


def _read(cursor: _Cursor) -> GgufHeader:
    cursor.take("4s")
    if (version := cursor.take("I")) not in (2, 3):
        raise NotGguf(f"GGUF version {version} is not supported")
    tensors, pairs = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.take("I"))
    parameters = 0
    for _ in range(tensors):
        cursor.text()
        shape = [cursor.take("Q") for _ in range(cursor.take("I"))]
        cursor.take("I")
        cursor.take("Q")
        parameters += math.prod(shape)
    return GgufHeader(metadata, parameters)
