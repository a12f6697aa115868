"""Whether the process lives (`/healthz`), and whether it takes calls (`/readyz`): for supervisors, without a key."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from citadel.errors import DeviceOffline
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import SERVICES


async def healthz(_request: web.Request) -> web.Response:
    """Whether the process lives."""
    return json_response({"ok": True})


async def readyz(request: web.Request) -> web.Response:
    """Whether it takes calls."""
    request.app[SERVICES].gate.check()
    return json_response({"ok": True})


ROUTES: Final = (
    Route("GET", "/healthz", healthz, None),
    Route("GET", "/health", healthz, None),
    Route("GET", "/readyz", readyz, None, raises=(DeviceOffline,)),
)
