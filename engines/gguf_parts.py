"""A GGUF model as the one table that its parts make together; most models have one part, the largest have dozens.

The parts are named MODEL-00001-of-00003.gguf and so on. The first has the metadata; each says which it is.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from engines.gguf_header import GgufHeader, NotGguf, TensorEntry, read_header, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS: Final = 4096
_TABLES: Final = 16
"""How many are remembered."""
_SETTLED_S: Final = 1.0
"""A file that was changed later than so long ago may change once more without a clock of the file system showing it."""


class MissingPart(NotGguf):
    """One of a model's files is not there."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file, and the tensors that it has."""

    path: Path
    tensors: tuple[TensorEntry, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Table:
    """All of a model's tensors, and the metadata of its first file."""

    metadata: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def of_model(self, key: str) -> Any:
        """A value whose key begins with the architecture's name; None where there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int = 0) -> int:
        """A number of the model, such as `block_count`; the largest where the file has one for each layer."""
        value = self.of_model(key)
        if isinstance(value, list):
            return max((_whole(key, each) for each in cast("list[Any]", value)), default=default)
        return default if value is None else _whole(key, value)

    def per_layer(self, key: str, layers: int, default: int = 0) -> list[int]:
        """A number for each layer: some files have one for all of them, some an array."""
        value = self.of_model(key)
        if not isinstance(value, list):
            return [self.count(key, default)] * layers
        numbers = [_whole(key, each) for each in cast("list[Any]", value)]
        return (numbers + [numbers[-1] if numbers else default] * layers)[:layers]

    def check_complete(self) -> None:
        """`NotGguf` where a file ends before its last tensor does; a header alone is enough for all else here."""
        for part in self.parts:
            if part.path.stat().st_size < part.end:
                raise NotGguf(f"{part.path.name} is cut off: its tensors are not within the file")


def part_number(name: str) -> int | None:
    """Which part a file's name says that it is; None for a model of one file."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else None


def part_paths(first: Path) -> list[Path]:
    """The files of the model that begins with `first`, whether they are there or not."""
    match = _NAME.fullmatch(first.name)
    if match is None:
        return [first]
    count = int(match[3])
    if not 0 < count <= _MOST_PARTS:
        raise NotGguf(f"{first.name} can't be one of {count} parts")
    return [first.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def known_table(first: Path) -> Table:
    """As `read_table`, and it reads only files that may have changed since it last did."""
    try:
        states = [path.stat() for path in part_paths(first)]
    except OSError:
        return read_table(first)
    if time.time() - max(state.st_ctime for state in states) < _SETTLED_S:
        return read_table(first)
    return _known(first, tuple((state.st_ino, state.st_size, state.st_ctime_ns) for state in states))


@lru_cache(_TABLES)
def _known(first: Path, _states: tuple[tuple[int, int, int], ...]) -> Table:
    return read_table(first)


def read_table(first: Path) -> Table:
    """Reads the headers of all parts. Raises `NotGguf`, `MissingPart` and `OSError`."""
    paths = part_paths(first)
    missing = next((path.name for path in paths if not path.is_file()), None)
    if missing and len(paths) > 1:
        raise MissingPart(f"{missing} is missing")
    headers = [read_header(path) for path in paths]
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _check_place(path, header, number, len(paths))
    seen = set[str]()
    for path, header in zip(paths, headers, strict=True):
        if twice := next((tensor.name for tensor in header.tensors if tensor.name in seen), None):
            raise NotGguf(f"{path.name} has the tensor {twice!r}, which another part has too")
        seen.update(tensor.name for tensor in header.tensors)
    if (said := headers[0].metadata.get("split.tensors.count", len(seen))) != len(seen):
        raise NotGguf(f"{first.name} says that its parts have {shown(said)} tensors, and they have {len(seen)}")
    parts = tuple(Part(path, header.tensors, header.end) for path, header in zip(paths, headers, strict=True))
    return Table(headers[0].metadata, parts)


def _check_place(path: Path, header: GgufHeader, number: int, count: int) -> None:
    said_count, said_number = header.metadata.get("split.count", 1), header.metadata.get("split.no", number)
    if (said_count or 1) != count or said_number != number:
        said = f"part {shown(said_number)} of {shown(said_count)}"
        raise NotGguf(f"{path.name} says that it is {said}, counted from 0, not {number} of {count}")


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise NotGguf(f"the header is damaged: {key} is {shown(value)}")
    return value
