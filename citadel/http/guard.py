"""Who may use a route: the key, its scope, and whether the service is taking calls; in this order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Literal

from aiohttp import web
from pydantic import BaseModel

from citadel.accounts import auth
from citadel.accounts.auth import Scope
from citadel.errors import CitadelError
from citadel.http.middleware import speaks_anthropic
from citadel.http.services import ACCOUNT, SERVICES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """`scope`: what the key must carry; `any` is any valid key; None is open to all.

    The rest is what `/openapi.json` says of the route: the models of its body and of its query, its status and the
    types of its content when all is well, and the errors that the other fields do not imply.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    scope: Scope | Literal["any"] | None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    status: int = 200
    content: tuple[str, ...] = ("application/json",)
    raises: tuple[type[CitadelError], ...] = ()


async def admit(request: web.Request, scope: Scope | Literal["any"]) -> None:
    """Whose key it is, and whether it may. Raises MissingApiKey, InvalidApiKey, InsufficientScope."""
    id_, secret = auth.parse_authorization(request.headers, x_api_key=speaks_anthropic(request.path))
    account = await request.app[SERVICES].store.authenticate(id_, secret)
    request[ACCOUNT] = account
    if scope != "any":
        auth.require(account, scope)


def guarded(route: Route) -> Handler:
    scope = route.scope
    if scope is None:
        return route.handler

    @wraps(route.handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        services = request.app[SERVICES]
        await admit(request, scope)
        if route.scope in ("llm", "any"):  # the owner looks after a service that is offline, too
            services.gate.check()
        return await route.handler(request)

    return handle
