"""Anthropic's `POST /v1/messages`, and what a conversation would count as."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from citadel.http import calls
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import SERVICES
from citadel.wire.anthropic import CountBody, MessagesBody, count_request, messages_request
from citadel.wire.anthropic_answer import MessageAnswer


async def messages(request: web.Request) -> web.StreamResponse:
    call = await calls.read_call(request, messages_request)
    return await calls.answer(request, call, MessageAnswer(f"msg_{call.id}", call.request.requested_model))


async def count_tokens(request: web.Request) -> web.Response:
    asked = await calls.read(request, count_request)
    tokens = await request.app[SERVICES].pipeline.tokens(asked.what, asked.body_bytes)
    return json_response({"input_tokens": len(tokens)})


ROUTES: Final = (
    Route("POST", "/v1/messages", messages, "llm", body=MessagesBody),
    Route("POST", "/v1/messages/count_tokens", count_tokens, "llm", body=CountBody),
)
