"""`/admin`: what the owner does to models, keys, members and the service, with a key of the scope `admin`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from aiohttp import web
from pydantic import Field

from citadel.accounts.auth import KeyLimits, Scope
from citadel.accounts.store import MEMBER_LIMITS, day_number
from citadel.accounts.views import key_view, member_view
from citadel.engine import Placement
from citadel.errors import BadRequest, Conflict, NotFound
from citadel.http import json_body
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import SERVICES, Services

Limit = Annotated[int, Field(ge=1, le=2**53)] | None
MAX_USAGE_DAYS: Final = 366


# -- models


async def list_models(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    return json_response({"ok": True, "models": [model_view(services, id_) for id_ in services.config.models]})


async def load_model(request: web.Request) -> web.Response:
    services, id_ = request.app[SERVICES], _model_id(request)
    services.registry.load(id_)
    return json_response({"ok": True, "model": model_view(services, id_)}, status=202)


async def unload_model(request: web.Request) -> web.Response:
    services, id_ = request.app[SERVICES], _model_id(request)
    services.registry.unload(id_)
    return json_response({"ok": True, "model": model_view(services, id_)}, status=202)


class _Pin(json_body.Body):
    pinned: bool = True


async def pin_model(request: web.Request) -> web.Response:
    services, id_ = request.app[SERVICES], _model_id(request)
    services.registry.pin(id_, pinned=(await json_body.read(request, _Pin)).pinned)
    return json_response({"ok": True, "model": model_view(services, id_)})


def _model_id(request: web.Request) -> str:
    id_ = request.app[SERVICES].config.find(request.match_info["id"])
    if id_ is None:
        raise NotFound
    return id_


def model_view(services: Services, id_: str) -> dict[str, Any]:
    """A model as its owner sees it; times in seconds, `progress` from 0.0 to 1.0."""
    settings, status = services.config.models[id_], services.registry.status(id_)
    return {
        "id": id_,
        "engine": settings.engine,
        "mode": settings.effective_mode,
        "slots": settings.effective_slots,
        "state": status.state.value,
        "draining": status.draining,
        "pinned": status.pinned,
        "progress": status.progress,
        "remaining_s": status.remaining_s,
        "reason": status.reason,
        "running": status.running,
        "waiting": status.waiting,
        "context_length": status.context_length,
        "cold_start_s": status.cold_start_s,
        "placement": None if status.placement is None else placement_view(status.placement),
    }


def placement_view(placement: Placement) -> dict[str, Any]:
    """Bytes by tier as planned and as read back (null where it could not be), and the speed that was predicted."""
    return {
        "planned": dict(placement.planned),
        "found": None if placement.found is None else dict(placement.found),
        "elsewhere": list(placement.elsewhere),
        "tokens_per_s": round(placement.tokens_per_s, 3),
    }


# -- keys, members, usage


class _NewKey(json_body.Body):
    member: Annotated[str, Field(min_length=1, max_length=100)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    expires_days: Annotated[float, Field(gt=0, le=36_500)] | None = None
    models: list[str] | None = None
    calls_per_minute: Limit = None
    calls_per_day: Limit = None
    daily_calls: Limit = None


async def list_keys(request: web.Request) -> web.Response:
    rows = await request.app[SERVICES].store.run(lambda store: store.list_keys())
    return json_response({"ok": True, "keys": [key_view(row) for row in rows]})


async def create_key(request: web.Request) -> web.Response:
    body = await json_body.read(request, _NewKey)
    expires = None if body.expires_days is None else datetime.now(UTC) + timedelta(days=body.expires_days)
    models = None if body.models is None else frozenset(body.models)
    limits = KeyLimits(body.calls_per_minute, body.calls_per_day, body.daily_calls, models)
    arguments = body.member, frozenset(body.scopes), expires, limits
    key = await request.app[SERVICES].store.run(lambda store: store.create_key(*arguments))
    return json_response({"ok": True, "id": key.id, "key": key.text}, status=201)


async def revoke_key(request: web.Request) -> web.Response:
    id_ = request.match_info["id"]
    if not await request.app[SERVICES].store.run(lambda store: store.revoke_key(id_)):
        raise NotFound
    return json_response({"ok": True})


class _Rotation(json_body.Body):
    overlap_hours: Annotated[float, Field(ge=0, le=24 * MAX_USAGE_DAYS)] = 24


async def rotate_key(request: web.Request) -> web.Response:
    """A key's successor, with the same settings; the old one works for `overlap_hours` more."""
    id_, body = request.match_info["id"], await json_body.read(request, _Rotation)
    ends = datetime.now(UTC) + timedelta(hours=body.overlap_hours)
    store = request.app[SERVICES].store
    if await store.run(lambda each: each.find_key(id_)) is None:
        raise NotFound
    key = await store.run(lambda each: each.rotate_key(id_, ends))
    if key is None:
        raise Conflict("The key has ended, or has a successor already")
    return json_response({"ok": True, "id": key.id, "key": key.text}, status=201)


class _MemberChange(json_body.Body):
    daily_tokens: Limit = None
    open_per_member: Limit = None
    max_parallel: Limit = None


async def list_members(request: web.Request) -> web.Response:
    members = await request.app[SERVICES].store.run(lambda store: store.list_members())
    return json_response({"ok": True, "members": [member_view(name, limits) for name, limits in members.items()]})


async def set_member(request: web.Request) -> web.Response:
    """A limit that is given as null takes the member's own away; one that is not given stays."""
    name, body = request.match_info["name"], await json_body.read(request, _MemberChange)
    changes = {limit: getattr(body, limit) for limit in MEMBER_LIMITS if limit in body.model_fields_set}
    store = request.app[SERVICES].store
    if not await store.run(lambda each: each.set_member(name, changes)):
        raise NotFound
    limits = (await store.run(lambda each: each.list_members()))[name]
    return json_response({"ok": True, "member": member_view(name, limits)})


class _Days(json_body.Body):
    days: Annotated[int, Field(ge=1, le=MAX_USAGE_DAYS)] = 1


async def show_usage(request: web.Request) -> web.Response:
    days, today = json_body.query(request, _Days).days, day_number(datetime.now(UTC))
    rows = await request.app[SERVICES].store.run(lambda store: store.usage(today - days + 1, today))
    return json_response({"ok": True, "usage": rows})


# -- the service


class _Offline(json_body.Body):
    offline: bool = True


async def set_offline(request: web.Request) -> web.Response:
    """Refuse new calls, and end the running ones after the drain's time; or take calls again."""
    services = request.app[SERVICES]
    if (await json_body.read(request, _Offline)).offline:
        services.gate.begin_drain(services.config.server.drain_s)
    else:
        services.gate.open()
    return json_response({"ok": True, "offline": services.gate.offline})


ROUTES: Final = (
    Route("GET", "/admin/models", list_models, "admin"),
    Route("POST", "/admin/models/{id:.+}/load", load_model, "admin", status=202),
    Route("POST", "/admin/models/{id:.+}/unload", unload_model, "admin", status=202),
    Route("POST", "/admin/models/{id:.+}/pin", pin_model, "admin", body=_Pin),
    Route("GET", "/admin/keys", list_keys, "admin"),
    Route("POST", "/admin/keys", create_key, "admin", body=_NewKey, status=201),
    Route("DELETE", "/admin/keys/{id}", revoke_key, "admin"),
    Route("POST", "/admin/keys/{id}/rotate", rotate_key, "admin", body=_Rotation, status=201, raises=(Conflict,)),
    Route("GET", "/admin/members", list_members, "admin"),
    Route("POST", "/admin/members/{name}", set_member, "admin", body=_MemberChange),
    Route("GET", "/admin/usage", show_usage, "admin", query=_Days, raises=(BadRequest,)),
    Route("POST", "/admin/offline", set_offline, "admin", body=_Offline),
)
