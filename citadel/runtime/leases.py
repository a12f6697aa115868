"""Leases of the GPU for media jobs: who waits, who holds one, and until when. The registry decides."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from citadel.errors import NotFound
from citadel.logs import request_id
from citadel.runtime.gpu_queue import Job

Kind = Literal["image", "music", "other"]
HOLD_WITHOUT_HISTORY_S = 30.0


@dataclass(eq=False, slots=True)
class Lease:
    """`memory` in bytes, None for the whole GPU; times on the monotonic clock. Granted when the future is done.

    `attended`: who asked has not been answered yet, and until then it does not expire.
    """

    kind: Kind
    memory: int | None
    asked_at: float
    expires_at: float
    granted: asyncio.Future[None]
    granted_at: float | None = None
    spare: int | None = None
    attended: bool = True
    asked_by: str | None = field(default_factory=request_id)
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def job(self) -> Job:
        return Job(self.id, self.memory, self.asked_at, self.spare)

    def expired(self, now: float) -> bool:
        return not self.attended and self.expires_at <= now


@dataclass(slots=True)
class HoldTimes:
    """How long media jobs keep the GPU, learnt as a moving average in seconds."""

    mean_s: float = HOLD_WITHOUT_HISTORY_S
    known: bool = False

    def learn(self, seconds: float) -> None:
        self.mean_s = 0.7 * self.mean_s + 0.3 * seconds if self.known else seconds
        self.known = True


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """What its holder is told. `position` counts who is ahead; `expires_in_s` until it must be renewed or polled."""

    id: str
    state: Literal["granted", "queued"]
    position: int
    expires_in_s: float
    retry_after_s: int


class LeaseDesk:
    """Where media jobs ask. `line` is the registry's queue, in which models wait too; `changed` wakes its worker."""

    def __init__(self, line: list[Any], expiry_s: float, changed: Callable[[], None]) -> None:
        self._line = line
        self._expiry_s = expiry_s
        self._changed = changed
        self._leases: dict[str, Lease] = {}
        self.holds = HoldTimes()

    @property
    def running(self) -> list[Lease]:
        """In the order in which they were granted."""
        granted = [(lease.granted_at, lease) for lease in self._leases.values() if lease.granted_at is not None]
        return [lease for _, lease in sorted(granted, key=lambda each: each[0])]

    @property
    def open(self) -> int:
        """How many are granted or queued."""
        return len(self._leases)

    def ask(self, kind: Kind, memory: int | None) -> str:
        """Join the queue; returns the lease's id. Until it is first renewed it does not expire, but may be released."""
        now = time.monotonic()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lease = Lease(kind, memory, now, now + self._expiry_s, granted)
        self._leases[lease.id] = lease
        self._line.append(lease)
        self._changed()
        return lease.id

    async def wait(self, id_: str, seconds: float) -> None:
        """Until it is granted, or `seconds` have passed."""
        await asyncio.wait({self._find(id_).granted}, timeout=seconds)

    def renew(self, id_: str) -> None:
        """Keep it (or its place) for another while. Raises NotFound, as all of these do for a lease that ended."""
        lease = self._find(id_)
        lease.attended, lease.expires_at = False, time.monotonic() + self._expiry_s

    def release(self, id_: str) -> None:
        self._end(self._find(id_))

    def status(self, id_: str, ahead: int) -> LeaseStatus:
        """`ahead`: what is under way or running before anything that waits."""
        lease, now = self._find(id_), time.monotonic()
        left = max(0.0, lease.expires_at - now)
        if lease.granted_at is not None:
            return LeaseStatus(lease.id, "granted", 0, left, 0)
        position = self._line.index(lease) + ahead
        return LeaseStatus(lease.id, "queued", position, left, max(1, math.ceil(position * self.holds.mean_s)))

    def grant(self, id_: str, spare: int) -> None:
        """`spare` as in a `Job`."""
        lease, now = self._leases[id_], time.monotonic()
        self._line.remove(lease)
        lease.granted_at, lease.spare = now, spare
        lease.expires_at = max(lease.expires_at, now + self._expiry_s)
        lease.granted.set_result(None)

    def expire(self, now: float) -> None:
        for lease in list(self._leases.values()):
            if lease.expired(now):
                self._end(lease)

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values() if not lease.attended), default=None)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        if lease.granted_at is not None:
            self.holds.learn(time.monotonic() - lease.granted_at)
        else:
            self._line.remove(lease)
            lease.granted.cancel()
        self._changed()

    def _find(self, id_: str) -> Lease:
        lease = self._leases.get(id_)
        if lease is None or lease.expired(time.monotonic()):
            raise NotFound
        return lease
