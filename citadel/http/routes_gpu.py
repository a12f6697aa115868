"""`/v1/gpu/leases`: media jobs take turns with the models for the GPU, with a key of the scope `gpu`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from aiohttp import web
from pydantic import Field

from citadel.errors import RateLimited, TooManyLeases
from citadel.http import json_body
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import SERVICES
from citadel.runtime.leases import Kind
from citadel.runtime.registry import Registry

MAX_WAIT_S: Final = 900
MAX_OPEN: Final = 64
"""Leases that are granted or queued: a job that asks in a loop must not fill the queue that everybody waits in."""


class _Ask(json_body.Body):
    kind: Kind
    gpu_memory_gb: Annotated[float, Field(gt=0, le=100_000)] | None = None
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0


async def ask(request: web.Request) -> web.Response:
    """Answers when the lease is granted, or queued after `wait_s`. A caller that leaves before gives its place up."""
    body, registry = await json_body.read(request, _Ask), request.app[SERVICES].registry
    if registry.leases.open >= MAX_OPEN:
        raise TooManyLeases(MAX_OPEN, math.ceil(registry.leases.holds.mean_s))
    memory = None if body.gpu_memory_gb is None else int(body.gpu_memory_gb * 1e9)
    id_ = registry.leases.ask(body.kind, memory)
    try:
        await registry.considered()
        await registry.leases.wait(id_, body.wait_s)
    except BaseException:
        registry.leases.release(id_)
        raise
    registry.leases.renew(id_)
    return _told(registry, id_)


async def poll(request: web.Request) -> web.Response:
    """Looks, and keeps a place in the queue; a lease that is granted is kept by renewing it."""
    registry, id_ = request.app[SERVICES].registry, request.match_info["id"]
    if registry.lease_status(id_).state == "queued":
        registry.leases.renew(id_)
    return _told(registry, id_)


async def renew(request: web.Request) -> web.Response:
    registry, id_ = request.app[SERVICES].registry, request.match_info["id"]
    registry.leases.renew(id_)
    return _told(registry, id_)


async def release(request: web.Request) -> web.Response:
    request.app[SERVICES].registry.leases.release(request.match_info["id"])
    return json_response({"ok": True})


def _told(registry: Registry, id_: str) -> web.Response:
    status = registry.lease_status(id_)
    body: dict[str, Any] = {
        "ok": True,
        "id": status.id,
        "state": status.state,
        "position": status.position,
        "expires_in_s": math.floor(status.expires_in_s),
        "retry_after_s": status.retry_after_s,
    }
    headers = {"Retry-After": str(status.retry_after_s)} if status.state == "queued" else None
    return json_response(body, headers=headers)


ROUTES: Final = (
    Route("POST", "/v1/gpu/leases", ask, "gpu", body=_Ask, raises=(RateLimited,)),
    Route("GET", "/v1/gpu/leases/{id}", poll, "gpu"),
    Route("POST", "/v1/gpu/leases/{id}/renew", renew, "gpu"),
    Route("DELETE", "/v1/gpu/leases/{id}", release, "gpu"),
)
