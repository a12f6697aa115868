"""What all routes that ask a model share: steps 3 to 7 of a request in the contract's order, and how it is answered."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from aiohttp import web

from citadel.accounts.auth import Account
from citadel.config import Config
from citadel.errors import BadHeader, BadRequest, ModelNotFound, UnsupportedMediaType
from citadel.http import stream
from citadel.http.middleware import json_response
from citadel.http.services import ACCOUNT, SERVICES
from citadel.messages import CallEvent, ChatRequest, EmbedRequest
from citadel.pipeline import Call
from citadel.wire.dialect import Dialect
from citadel.wire.request import parse_json

_PARSED_INLINE_BYTES: Final = 2**16
_WHOLE_NUMBER: Final = re.compile(r"[0-9]+")

T = TypeVar("T")
R = TypeVar("R", ChatRequest, EmbedRequest)
Translate = Callable[[Mapping[str, Any], str, str], T]
"""A body, the configured id of the model, and the name that the caller used for it -> what is asked."""


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """`body_bytes`: the size of the body. `wait_s` as the caller's header has it."""

    what: T
    body_bytes: int
    wait_s: float | None


async def read(request: web.Request, translate: Translate[T]) -> Asked[T]:
    """Raises, in this order, what is wrong with the headers, the body, the model's name and the fields."""
    services = request.app[SERVICES]
    config = services.config
    if request.content_type != "application/json":
        raise UnsupportedMediaType
    wait_s = _asked_wait(request.headers, config.server.wait_max_s)
    raw = await services.bodies.read(request)
    large = len(raw) > _PARSED_INLINE_BYTES
    body = await asyncio.to_thread(parse_json, raw) if large else parse_json(raw)
    name, model = _model(body, config, request[ACCOUNT])
    arguments = body, model, name
    what = await asyncio.to_thread(translate, *arguments) if large else translate(*arguments)
    return Asked(what, len(raw), wait_s)


async def read_call(request: web.Request, translate: Translate[R]) -> Call[R]:
    asked = await read(request, translate)
    server, wait_s = request.app[SERVICES].config.server, asked.wait_s
    if wait_s is None:
        wait_s = server.wait_stream_s if asked.what.stream else server.wait_s
    return Call(secrets.token_hex(8), request[ACCOUNT], asked.what, wait_s, asked.body_bytes)


async def answer(
    request: web.Request, call: Call[ChatRequest] | Call[EmbedRequest], dialect: Dialect
) -> web.StreamResponse:
    services = request.app[SERVICES]
    if call.request.stream:
        return await stream.send(request, dialect, lambda say: services.pipeline.run(call, say))
    said: list[CallEvent] = []

    async def keep(event: CallEvent) -> None:
        said.append(event)

    with services.gate.call():
        await services.pipeline.run(call, keep)
    return json_response(dialect.whole(said))


def _asked_wait(headers: Mapping[str, str], maximum: float) -> float | None:
    """Seconds that the caller will wait for a load; None where the header was not sent."""
    text = headers.get("X-LLM-Wait")
    if text is None:
        return None
    if _WHOLE_NUMBER.fullmatch(text.strip()) is None:
        raise BadHeader("X-LLM-Wait must be a whole number of seconds")
    return min(float(text), maximum)


def _model(body: Mapping[str, Any], config: Config, account: Account) -> tuple[str, str]:
    """The name that the caller used, and the configured id that it means. What a key may not use, it does not see."""
    name = body.get("model")
    if name is None:
        name = config.default_model
    if not isinstance(name, str):
        raise BadRequest("model: it must be a string", param="model")
    model = config.find(name)
    if model is None or not account.may_use(model):
        raise ModelNotFound(name, [each for each in config.models if account.may_use(each)])
    return name, model
