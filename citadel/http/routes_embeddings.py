"""`POST /v1/embeddings`."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from citadel.http import calls
from citadel.http.guard import Route
from citadel.wire.embeddings import EmbeddingAnswer, EmbeddingBody, embedding_request


async def embeddings(request: web.Request) -> web.StreamResponse:
    call = await calls.read_call(request, embedding_request)
    return await calls.answer(request, call, EmbeddingAnswer(call.request))


ROUTES: Final = (Route("POST", "/v1/embeddings", embeddings, "llm", body=EmbeddingBody),)
