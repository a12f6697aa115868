"""`POST /v1/responses`."""

from __future__ import annotations

import time
from typing import Final

from aiohttp import web

from citadel.http import calls
from citadel.http.guard import Route
from citadel.wire.responses import ResponsesBody, responses_request
from citadel.wire.responses_answer import ResponseAnswer


async def responses(request: web.Request) -> web.StreamResponse:
    call = await calls.read_call(request, responses_request)
    return await calls.answer(request, call, ResponseAnswer(call.id, int(time.time()), call.request))


ROUTES: Final = (Route("POST", "/v1/responses", responses, "llm", body=ResponsesBody),)
