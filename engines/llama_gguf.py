"""The metadata at the head of a GGUF file, read without llama.cpp, whose interface leaves arrays out."""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

MAGIC: Final = b"GGUF"
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


class NotGguf(Exception):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        start = self._skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, start)

    def string(self) -> str:
        length = self.number("Q")
        start = self._skip(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise NotGguf(f"its metadata has a value of the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self, kind: int, count: int) -> tuple[Any, ...] | None:
        """The numbers; None for texts, which are the vocabulary and long."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        if kind != _STRING:
            raise NotGguf("its metadata has an array of arrays")
        for _ in range(count):
            self._skip(self.number("Q"))
        return None

    def _skip(self, size: int) -> int:
        start = self._at
        self._at += size
        if self._at > len(self._data):
            raise NotGguf("it ends inside its metadata")
        return start


def read_metadata(path: Path) -> dict[str, Any]:
    """Raises `NotGguf` with what is wrong, as a clause about the file, or `OSError`."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise NotGguf("it is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            version = reader.number("I")
            if version not in (2, 3):
                raise NotGguf(f"it is GGUF version {version}; versions 2 and 3 can be read")
            _tensors, count = reader.numbers("Q", 2)
            return {reader.string(): reader.value(reader.number("I")) for _ in range(count)}
