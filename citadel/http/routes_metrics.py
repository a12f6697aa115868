"""`/metrics`, for Prometheus: open where only this machine can ask, else for a key of the scope `admin`."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from citadel.config import Server
from citadel.http import guard
from citadel.http.guard import Route
from citadel.http.services import SERVICES
from citadel.metrics import CONTENT_TYPE, ModelGauges
from citadel.runtime import memory

_LOOPBACK: Final = ("127.", "::1", "localhost")


async def show(request: web.Request) -> web.Response:
    """What is counted and timed, for Prometheus."""
    services = request.app[SERVICES]
    if not public(services.config.server):
        await guard.admit(request, "admin")
    models: dict[str, ModelGauges] = {}
    for id_ in services.config.models:
        now = services.registry.status(id_)
        models[id_] = ModelGauges(now.state.value, now.slots, now.running, now.waiting)
    ram, gpu = await asyncio.to_thread(lambda: (memory.measured_ram(), memory.measured_gpu()))
    body = services.metrics.render(models, {"ram": ram, "gpu": gpu})
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})


def public(server: Server) -> bool:
    """Whether anybody who reaches the server may read it."""
    return server.host.startswith(_LOOPBACK) if server.metrics_public is None else server.metrics_public


ROUTES: Final = (Route("GET", "/metrics", show, None, content=(CONTENT_TYPE,)),)
