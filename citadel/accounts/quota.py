"""What one account may have open at once: pure counting, no clock. A refusal changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from citadel.errors import DeviceBusy, ParallelUnsupported, TooManyParallel, TooManyStreams


class OpenCalls:
    def __init__(self, total: int, per_member: int) -> None:
        self._total = total
        self._per_member = per_member
        self._members: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()

    @property
    def count(self) -> int:
        return self._members.total()

    @contextmanager
    def enter(self, member: str, model: str, max_parallel: int | None) -> Generator[None]:
        """Hold one call open. Raises DeviceBusy, TooManyStreams, ParallelUnsupported or TooManyParallel."""
        if self.count >= self._total:
            raise DeviceBusy(self.count)
        if self._members[member] >= self._per_member:
            raise TooManyStreams(self._per_member)
        if max_parallel is not None and self._models[member, model] >= max_parallel:
            raise ParallelUnsupported(model) if max_parallel == 1 else TooManyParallel(model, max_parallel)
        self._members[member] += 1
        self._models[member, model] += 1
        try:
            yield
        finally:
            self._drop(member, model)

    def _drop(self, member: str, model: str) -> None:
        self._members[member] -= 1
        self._models[member, model] -= 1
        # An entry at zero is taken out, or every member that ever called would be remembered.
        self._members, self._models = +self._members, +self._models
