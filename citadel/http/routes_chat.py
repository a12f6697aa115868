"""`POST /v1/chat/completions`: steps 3 to 7 of a request in the contract's order, then the pipeline's events."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final

from aiohttp import web

from citadel.accounts.auth import Account
from citadel.config import Config
from citadel.errors import BadHeader, BadRequest, ModelNotFound, UnsupportedMediaType
from citadel.http import stream
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import ACCOUNT, SERVICES, Services
from citadel.pipeline import Call
from citadel.wire import request as wire
from citadel.wire.response import Answering, fold

_PARSED_INLINE_BYTES: Final = 2**16
_MOST_DIGITS: Final = 12
_WHOLE_NUMBER: Final = re.compile(r"[0-9]+")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    call = await _read_call(request, services)
    server, chat = services.config.server, call.request
    answering = Answering(
        id=f"chatcmpl-{call.id}",
        created=int(time.time()),
        model=chat.requested_model,
        n=chat.n,
        include_usage=chat.include_usage,
        continuous_usage=chat.continuous_usage_stats,
        reasoning_content=server.reasoning_content,
    )
    async with aclosing(services.pipeline.run(call)) as events:
        if chat.stream:
            return await stream.send(request, answering, events, services.gate)
        with services.gate.call():
            said = [event async for event in events]
    return json_response(fold(answering, said, logprobs=chat.sampling.logprobs is not None))


async def _read_call(request: web.Request, services: Services) -> Call:
    config = services.config
    if request.content_type != "application/json":
        raise UnsupportedMediaType
    wait_s = _asked_wait(request.headers, config.server.wait_max_s)
    raw = await services.bodies.read(request)
    large = len(raw) > _PARSED_INLINE_BYTES
    body = await asyncio.to_thread(wire.parse_json, raw) if large else wire.parse_json(raw)
    name, model = _model(body, config, request[ACCOUNT])
    arguments = body, model, name
    chat = await asyncio.to_thread(wire.chat_request, *arguments) if large else wire.chat_request(*arguments)
    if wait_s is None:
        wait_s = config.server.wait_stream_s if chat.stream else config.server.wait_s
    return Call(secrets.token_hex(8), request[ACCOUNT], chat, wait_s, len(raw))


def _asked_wait(headers: Mapping[str, str], maximum: float) -> float | None:
    """Seconds that the caller will wait for a load; None where the header was not sent."""
    text = headers.get("X-LLM-Wait")
    if text is None:
        return None
    if _WHOLE_NUMBER.fullmatch(text.strip()) is None:
        raise BadHeader("X-LLM-Wait must be a whole number of seconds")
    return maximum if len(text) > _MOST_DIGITS else min(float(text), maximum)


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


ROUTES: Final = (Route("POST", "/v1/chat/completions", chat_completions, "llm", body=wire.ChatBody),)
