"""What an unloaded model had computed, kept in a file, so that its next load need not compute it again.

A file per model: a line of JSON (which model it is of; of each sequence how many tokens it has, the size of its copy,
and at which lengths it has checkpoints of which size), then tokens, copies and checkpoints, one after the other, and a
digest of all before it at the end. Only this user can read it: prompts are in it. A file that is not whole, or of other
weights or settings, is removed and never given to llama.cpp.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.kept import session_path
from engines.llama_cache import Checkpoint
from engines.llama_log import log
from engines.llama_native import NativeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from citadel.engine import EngineSpec
    from engines.llama_batch import Planner
    from engines.llama_context import Context
    from engines.llama_options import Settings

_DIGEST: Final = 32
_MOST_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A sequence: its tokens, and llama.cpp's copy of what it computed of them.

    `checkpoints` are copies by the shorter length that they go back to, where a sequence can't be cut back to any.
    """

    tokens: array[int]
    data: NDArray[np.uint8]
    checkpoints: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict[int, "NDArray[np.uint8]"])

    @property
    def pieces(self) -> list[memoryview]:
        """As they are in the file."""
        return [memoryview(self.tokens), self.data.data, *(copy.data for copy in self.checkpoints.values())]

    @property
    def size(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Sessions:
    """A model's file, where its settings keep one; else what an earlier load kept is removed."""

    def __init__(self, spec: EngineSpec, settings: Settings, fingerprint: str) -> None:
        self._path = session_path(spec.data_dir, spec.model) if spec.data_dir else None
        self._most = settings.session
        context = {key: settings.context[key] for key in ("type_k", "type_v", "kv_unified")}
        self._of = f"{fingerprint} {context}"

    def restore(self, planner: Planner) -> None:
        """What was kept is what the planner has in its archive, as if it had just lost its place."""
        if self._path is None:
            return
        if not self._most:
            self._path.unlink(missing_ok=True)
            return
        kept = load(self._path, self._of, self._most)
        for each in reversed(kept):  # the archive forgets first what it was told first
            checkpoints = [Checkpoint(length) for length in each.checkpoints]
            for checkpoint in checkpoints:
                planner.archive.promise_checkpoint(checkpoint)
                planner.archive.fill(checkpoint, each.checkpoints[checkpoint.length])
            planner.archive.fill(planner.promise(each.tokens, checkpoints), each.data)
        if kept:
            log.info("%d conversations are there again as they were", len(planner.archive.saved()))

    def keep(self, planner: Planner, context: Context) -> None:
        if self._path is None or not self._most:
            return
        try:
            count = save(self._path, self._of, _computed(planner, context), self._most)
        except (OSError, NativeError) as error:
            log.warning("what was computed is not kept: %s", error)
        else:
            log.info("%d conversations are kept for the next load", count)


def _computed(planner: Planner, context: Context) -> Iterable[Kept]:
    """All that the planner has computed, the latest first; each is copied when it is asked for."""
    for sequence in sorted(planner.sequences, key=lambda each: -each.used):
        if sequence.tokens:
            yield Kept(sequence.tokens, context.save(sequence.id), _copies(sequence.checkpoints))
    for saved in reversed(planner.archive.saved()):
        if saved.data is not None:
            yield Kept(saved.tokens, saved.data, _copies(saved.checkpoints))


def _copies(checkpoints: Iterable[Checkpoint]) -> dict[int, NDArray[np.uint8]]:
    return {each.length: each.data for each in checkpoints if each.data is not None}


def save(path: Path, of: str, sequences: Iterable[Kept], most: int) -> int:
    """Writes as many sequences as fit into `most` bytes, the first ones first; returns how many. Raises OSError."""
    chosen: list[Kept] = []
    size = 0
    for kept in sequences:
        if size + kept.size <= most:
            chosen.append(kept)
            size += kept.size
    if not chosen:
        path.unlink(missing_ok=True)
        return 0
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    table = [
        [len(kept.tokens), kept.data.nbytes, [[length, copy.nbytes] for length, copy in kept.checkpoints.items()]]
        for kept in chosen
    ]
    line = json.dumps({"of": of, "sequences": table})
    digest, part = hashlib.sha256(), path.with_suffix(".state-new")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        pieces = (piece for kept in chosen for piece in kept.pieces)
        for piece in (line.encode() + b"\n", *pieces):
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())
    part.replace(path)
    return len(chosen)


def load(path: Path, of: str, most: int) -> list[Kept]:
    """What was kept; nothing, and the file is removed, where it is not what `save` wrote of the same model."""
    try:
        if path.stat().st_size > most + _MOST_LINE + _DIGEST:
            raise ValueError("the file is too large")
        content = path.read_bytes()
        return _parsed(content, of)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        path.unlink(missing_ok=True)
        return []


def _parsed(content: bytes, of: str) -> list[Kept]:
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("the file is not whole")
    line, _, rest = body.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    if head["of"] != of:
        raise ValueError("the file is of another model")
    found: list[Kept] = []
    file = io.BytesIO(rest)

    def copy(size: int) -> NDArray[np.uint8]:
        return np.frombuffer(file.read(size), np.uint8)

    for count, size, checkpoints in head["sequences"]:
        tokens = array("i", file.read(4 * count))
        found.append(Kept(tokens, copy(size), {length: copy(nbytes) for length, nbytes in checkpoints}))
    return found
