"""`GET /v1/models`: what is installed and in which state. It reads, and never starts a model or waits for one."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from citadel.errors import ModelNotFound
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import ACCOUNT, SERVICES, Services
from citadel.runtime.states import State

_STATUS_VALUE: Final[dict[State, str]] = {
    State.LOADED: "loaded",
    State.STARTING: "loading",
    State.STOPPED: "unloaded",
    State.UNAVAILABLE: "unloaded",
}
"""The states by the names that clients of other servers know."""


async def list_models(request: web.Request) -> web.Response:
    services, account = request.app[SERVICES], request[ACCOUNT]
    usable = [id_ for id_ in services.config.models if account.may_use(id_)]
    return json_response({"object": "list", "data": [_entry(services, id_, id_) for id_ in usable]})


async def one_model(request: web.Request) -> web.Response:
    services, account, name = request.app[SERVICES], request[ACCOUNT], request.match_info["id"]
    id_ = services.config.find(name)
    if id_ is None or not account.may_use(id_):
        raise ModelNotFound(name, [each for each in services.config.models if account.may_use(each)])
    return json_response(_entry(services, id_, name))


def _entry(services: Services, id_: str, name: str) -> dict[str, Any]:
    settings, status = services.config.models[id_], services.registry.status(id_)
    entry: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": services.config.server.owned_by,
        "engine": settings.engine,
        "mode": settings.effective_mode,
        "loaded": status.state is State.LOADED,
        "state": status.state.value,
        "context_length": status.context_length,
        "cold_start_s": status.cold_start_s,
        "notes": settings.notes,
        "format": services.pipeline.format_of(id_),
        "max_model_len": status.context_length,
        "status": {"value": _STATUS_VALUE[status.state]},
    }
    if status.reason is not None:
        entry["reason"] = status.reason
    return entry


ROUTES: Final = (
    Route("GET", "/v1/models", list_models, "any"),
    Route("GET", "/v1/models/", list_models, "any"),
    Route("GET", "/v1/models/{id:.+}", one_model, "any", raises=(ModelNotFound,)),
)
