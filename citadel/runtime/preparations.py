"""Looking at a model's files before it is loaded, in threads, once however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from citadel.config import Config
from citadel.runtime import installed, sources
from citadel.runtime.entry import Entry
from citadel.runtime.gpu_queue import Resident
from citadel.runtime.installed import AdapterOf, Prepared


class Preparations:
    """`changed` is called when one has ended; `residents` gives what is loaded now."""

    def __init__(
        self, adapter_of: AdapterOf, changed: Callable[[], None], residents: Callable[[], Sequence[Resident]]
    ) -> None:
        self._adapter_of = adapter_of
        self._residents = residents
        self._changed = changed

    def of(self, entry: Entry, config: Config, *, fetch: bool) -> asyncio.Task[Prepared]:
        """The one under way, or a new one; `fetch` allows a download. It fails as `installed.prepare` does."""
        if entry.preparing is None:
            entry.preparing = asyncio.create_task(self._prepare(entry, config, fetch=fetch), name=f"prepare {entry.id}")
        return entry.preparing

    async def missing(self, entry: Entry, config: Config) -> str | None:
        """Why the weights are not on this disk, or None."""
        try:
            await asyncio.to_thread(sources.locate, entry.id, entry.settings.source, config.folder)
        except sources.SourceMissing as missing:
            return str(missing)
        return None

    async def _prepare(self, entry: Entry, config: Config, *, fetch: bool) -> Prepared:
        try:
            arguments = entry.id, config, self._adapter_of
            may_fetch = fetch and config.server.auto_download
            entry.prepared = await asyncio.to_thread(
                installed.prepare, *arguments, fetch=may_fetch, residents=self._residents()
            )
        finally:
            entry.preparing = None
            self._changed()
        return entry.prepared
