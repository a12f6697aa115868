"""What every API's answer provides, so that one stream and one route serve them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from citadel.errors import CitadelError
from citadel.messages import CallEvent

Json = dict[str, Any]
Sse = tuple[str | None, Json]
"""A server-sent event: its name, where the API names them, and its data."""


class Dialect(Protocol):
    """One call's answer in the words of one API. An instance serves one call, streamed or whole, and no other."""

    ends_with_done: ClassVar[bool]
    """Whether `data: [DONE]` follows the last event."""
    pings: ClassVar[Sse | None]
    """What is sent while a call waits; None is a comment that says for what."""

    def stream(self, event: CallEvent) -> Iterable[Sse] | bytes:
        """What is sent for `event`; bytes are sent as they are."""
        ...

    def failed(self, error: CitadelError) -> Iterable[Sse]:
        """What is sent when the call fails after the headers."""
        ...

    def whole(self, events: Iterable[CallEvent]) -> Json:
        """The answer that the same stream would have built up."""
        ...
