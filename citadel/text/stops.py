"""Stop strings, matched across pieces of text. The match is not shown, nor what follows it."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it text; it returns what may be shown, holding back an end that could begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops: tuple[str, ...] = tuple(stops)
        self._held: str = ""
        self.match: str | None = None
        """The stop string that was found."""

    @property
    def matched(self) -> bool:
        return self.match is not None

    @property
    def held(self) -> int:
        """Characters that are known but not shown yet."""
        return len(self._held)

    def feed(self, text: str) -> str:
        if not self._stops or self.matched:
            return "" if self.matched else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.match = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held end, when no more text can complete it."""
        held = self._held
        self._held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
