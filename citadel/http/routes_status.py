"""`/admin/status`: everything about the server at one moment, once or as a stream of moments; the page lives on it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from aiohttp import web

from citadel.accounts.store import day_number
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.routes_admin import model_view
from citadel.http.services import SERVICES, Services
from citadel.http.stream import Sender, answer
from citadel.metrics import MINUTES, Throughput
from citadel.runtime import memory

EVERY_S: Final = 1.0


async def once(request: web.Request) -> web.Response:
    """Everything about the server at this moment."""
    return json_response({"ok": True, **await snapshot(request.app[SERVICES])})


async def stream(request: web.Request) -> web.StreamResponse:
    """A snapshot a second, until the reader goes, or falls too far behind, or the server ends."""

    async def write(sender: Sender) -> None:
        while True:
            await sender.write(b"data: " + orjson.dumps(await snapshot(request.app[SERVICES])) + b"\n\n")
            await asyncio.sleep(EVERY_S)

    return await answer(request, write, lambda _error: b"")


async def snapshot(services: Services) -> dict[str, Any]:
    """Tokens a second now and by minute of the last hour, oldest first; memory in bytes; usage of this UTC day."""
    now, today = time.monotonic(), day_number(datetime.now(UTC))
    rates = services.metrics.throughput
    usage = await services.store.run(lambda store: store.usage(today, today))
    total, ram, gpu = await asyncio.to_thread(lambda: (memory.total(), memory.measured_ram(), memory.measured_gpu()))
    unused, hours = Throughput(), [rate.last_hour(now) for rate in rates.values()]
    return {
        "offline": services.gate.offline,
        "open_calls": services.ledger.open_calls,
        "tokens_per_s": sum(rate.now(now) for rate in rates.values()),
        "hour": [sum(minute) for minute in zip(*hours, strict=True)] or [0.0] * MINUTES,
        "memory": {"ram": {"total": total.ram, "free": ram}, "gpu": {"total": total.gpu, "free": gpu}},
        "models": [
            {**model_view(services, id_), "tokens_per_s": rates.get(id_, unused).now(now)}
            for id_ in services.config.models
        ],
        "queue": [asdict(place) for place in services.registry.line()],
        "usage": usage,
    }


ROUTES: Final = (
    Route("GET", "/admin/status", once, "admin"),
    Route("GET", "/admin/status/stream", stream, "admin", content=("text/event-stream",)),
)
