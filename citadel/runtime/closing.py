"""Closing engines, also those that do not close: a thread stuck in native code cannot be ended from outside.

Such an engine is given up after a while. It is never used again, and its memory stays booked until it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from citadel.engine import Engine, Need

log = structlog.get_logger("citadel.registry")

PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class _Stuck:
    model: str
    need: Need


class Closer:
    """`changed` is called when a stuck engine has returned after all."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._stuck: dict[asyncio.Task[None], _Stuck] = {}

    @property
    def booked(self) -> list[Need]:
        return [stuck.need for stuck in self._stuck.values()]

    @property
    def detail(self) -> str:
        """What to add when memory falls short; empty if nothing is stuck."""
        models = sorted({stuck.model for stuck in self._stuck.values()})
        ram = sum(stuck.need.ram + stuck.need.gpu for stuck in self._stuck.values())
        return f"{ram / 1e9:.2f} GB are held by a stuck engine of {', '.join(models)}" if models else ""

    async def close(self, model: str, engine: Engine, need: Need) -> None:
        """Returns when it is closed, or given up."""
        closing = asyncio.create_task(engine.close(), name=f"close {model}")
        await asyncio.wait({closing}, timeout=PATIENCE_S)
        if closing.done():
            closing.result()
            return
        log.error("engine does not close and is given up", model=model)
        self._stuck[closing] = _Stuck(model, need)
        closing.add_done_callback(self._returned)

    def _returned(self, closing: asyncio.Task[None]) -> None:
        stuck = self._stuck.pop(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log.error("stuck engine failed", model=stuck.model, exc_info=error)
        else:
            log.info("stuck engine returned", model=stuck.model)
        self._changed()
