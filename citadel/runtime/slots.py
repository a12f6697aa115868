"""Who may generate on one loaded model, and who is next: pure bookkeeping, no clock, no await.

First come, first served within a member; members take turns when several wait, so that one with sixty waiting calls
does not starve another's one. A call of `n` choices takes `n` slots at once; whoever is next is waited for, never
overtaken, so that a large call comes to its turn.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Slots(Generic[T]):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: dict[T, int] = {}
        self._waiting: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()
        """Per member, the next member to be served first."""

    @property
    def free(self) -> int:
        return self.capacity - sum(self._held.values())

    @property
    def running(self) -> tuple[T, ...]:
        return tuple(self._held)

    @property
    def waiting(self) -> tuple[T, ...]:
        return tuple(call for queue in self._waiting.values() for call, _ in queue)

    @property
    def idle(self) -> bool:
        return not self._held and not self._waiting

    def enter(self, call: T, member: str, n: int) -> list[T]:
        """Ask for `n` slots; returns the calls that may run now (this one, or none)."""
        if n > self.capacity:
            raise ValueError(f"{n} slots asked of {self.capacity}")
        self._waiting.setdefault(member, deque()).append((call, n))
        return self._grant()

    def leave(self, call: T) -> list[T]:
        """Give back what `call` holds, or its place; returns the calls that may run now. Unknown calls are ignored."""
        if call not in self._held:
            for member, queue in list(self._waiting.items()):
                kept = deque(entry for entry in queue if entry[0] != call)
                if kept:
                    self._waiting[member] = kept
                else:
                    del self._waiting[member]
        self._held.pop(call, None)
        return self._grant()

    def _grant(self) -> list[T]:
        granted: list[T] = []
        while self._waiting:
            member, queue = next(iter(self._waiting.items()))
            call, n = queue[0]
            if n > self.free:
                break
            queue.popleft()
            self._held[call] = n
            granted.append(call)
            if queue:
                self._waiting.move_to_end(member)
            else:
                del self._waiting[member]
        return granted
