"""`POST /v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

import time
from typing import Final

from aiohttp import web

from citadel.http import calls
from citadel.http.guard import Route
from citadel.http.services import SERVICES
from citadel.messages import ChatRequest
from citadel.pipeline import Call
from citadel.wire.completions import CompletionAnswer, CompletionBody, completion_request
from citadel.wire.request import ChatBody, chat_request
from citadel.wire.response import Answering, ChatAnswer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    call = await calls.read_call(request, chat_request)
    answering = _answering(request, call, "chatcmpl")
    dialect = ChatAnswer(answering, logprobs=call.request.sampling.logprobs is not None)
    return await calls.answer(request, call, dialect)


async def completions(request: web.Request) -> web.StreamResponse:
    call = await calls.read_call(request, completion_request)
    return await calls.answer(request, call, CompletionAnswer(_answering(request, call, "cmpl"), call.request))


def _answering(request: web.Request, call: Call[ChatRequest], prefix: str) -> Answering:
    return Answering(
        id=f"{prefix}-{call.id}",
        created=int(time.time()),
        model=call.request.requested_model,
        n=call.request.n,
        include_usage=call.request.include_usage,
        continuous_usage=call.request.continuous_usage_stats,
        reasoning_content=request.app[SERVICES].config.server.reasoning_content,
    )


ROUTES: Final = (
    Route("POST", "/v1/chat/completions", chat_completions, "llm", body=ChatBody),
    Route("POST", "/v1/completions", completions, "llm", body=CompletionBody),
)
