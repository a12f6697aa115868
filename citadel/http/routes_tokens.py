"""`POST /tokenize` and `/detokenize`: what a model's tokenizer says, without loading the model.

They take no slot and no place in the limits: no model runs for them.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

from citadel.errors import BadRequest
from citadel.http import calls
from citadel.http.guard import Route
from citadel.http.middleware import json_response
from citadel.http.services import SERVICES
from citadel.wire.tokens import DetokenizeBody, detokenize_request, tokenize_request


async def tokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    asked = await calls.read(request, tokenize_request)
    model = asked.what.request.model
    tokens = await services.pipeline.tokens(asked.what.request, asked.body_bytes)
    tokenizer = await services.pipeline.tokenizer(model)
    limit = services.registry.status(model).context_length or tokenizer.context_length
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
    if asked.what.token_texts:
        answer["token_strs"] = await asyncio.to_thread(lambda: [tokenizer.decode([token]) for token in tokens])
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    asked = (await calls.read(request, detokenize_request)).what
    tokenizer = await request.app[SERVICES].pipeline.tokenizer(asked.model)
    if any(token >= tokenizer.vocabulary_size for token in asked.tokens):
        raise BadRequest(f"tokens: ids of this model are below {tokenizer.vocabulary_size}", param="tokens")
    return json_response({"prompt": await asyncio.to_thread(tokenizer.decode, asked.tokens)})


ROUTES: Final = (
    Route("POST", "/tokenize", tokenize, "llm"),
    Route("POST", "/detokenize", detokenize, "llm", body=DetokenizeBody),
)
