"""Who wants a model and who has it: the queue for the GPU, the calls that wait for a load, those in the slots.

Bookkeeping of the registry, all of it at once: nothing here awaits, loads or decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from citadel.errors import CitadelError
from citadel.logs import request_id
from citadel.runtime.entry import Entry, Ticket
from citadel.runtime.leases import Lease
from citadel.runtime.states import Loaded, Starting


class Claims:
    """`changed` is called when there is something to decide anew. `queue` is shared with the desk of the leases."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.queue: list[Entry | Lease] = []
        self._changed = changed

    def enter(self, entry: Entry, ticket: Ticket) -> None:
        """To the model's slots if it takes calls, else among those who wait for it."""
        phase = entry.phase
        if isinstance(phase, Loaded) and not phase.draining and not entry.waiting:
            self._grant(phase, phase.slots.enter(ticket, ticket.member, ticket.n))
        else:
            entry.waiting[ticket] = None
            self.want(entry)

    def leave(self, entry: Entry, ticket: Ticket) -> None:
        """Give back what the ticket holds, or its place."""
        entry.waiting.pop(ticket, None)
        if not ticket.granted.done():
            ticket.granted.cancel()
        elif not ticket.granted.cancelled():
            ticket.granted.exception()  # marks it as seen: a caller that left early has not looked
        if isinstance(entry.phase, Loaded):
            self._grant(entry.phase, entry.phase.slots.leave(ticket))
            entry.phase.last_used = time.monotonic()

    def want(self, entry: Entry) -> None:
        """Queue a load, unless one is under way or queued."""
        if not isinstance(entry.phase, Starting) and entry not in self.queue:
            entry.asked_at, entry.asked_by = time.monotonic(), request_id()
            self.queue.append(entry)
        self._changed()

    def drop(self, entry: Entry) -> None:
        """Its load is no longer queued."""
        if entry in self.queue:
            self.queue.remove(entry)

    def admit(self, entry: Entry) -> None:
        """The model is there: its waiting calls go to its slots, in the order they came."""
        assert isinstance(entry.phase, Loaded)
        self.drop(entry)
        entry.held_until = -math.inf
        tickets, entry.waiting = list(entry.waiting), {}
        for ticket in tickets:
            self._grant(entry.phase, entry.phase.slots.enter(ticket, ticket.member, ticket.n))

    def fail(self, entry: Entry, tickets: Iterable[Ticket], error: CitadelError) -> None:
        entry.held_until = -math.inf
        for ticket in list(tickets):
            entry.waiting.pop(ticket, None)
            if not ticket.granted.done():
                ticket.granted.set_exception(error)

    def _grant(self, phase: Loaded, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.granted.done():
                ticket.granted.set_result(phase.engine)
