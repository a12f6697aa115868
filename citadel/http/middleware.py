"""What surrounds every request: its id, its line in the log, CORS, and the one place where errors become answers."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

import orjson
import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from citadel import errors
from citadel.errors import CitadelError, Internal, MethodNotAllowed, MethodNotImplemented, NotFound
from citadel.http import ratelimit
from citadel.http.services import ACCOUNT, REQUEST_ID, SERVICES

log = structlog.get_logger("citadel.http")

_GIVEN_ID: Final = re.compile(r"[0-9a-f]{16,64}")
_LLM_ROUTES: Final = re.compile(
    r"/v1/(chat/completions|completions|embeddings|responses|models(/.*)?)|/tokenize|/detokenize"
)
_ANTHROPIC_ROUTES: Final = re.compile(r"/v1/messages(/.*)?")
_EXPOSED: Final = "X-Request-Id, Retry-After, retry-after-ms, x-should-retry"


def speaks_openai(path: str) -> bool:
    """Whether the route at `path` answers errors in the OpenAI format; most others use the Citadel format."""
    return _LLM_ROUTES.fullmatch(path) is not None


def speaks_anthropic(path: str) -> bool:
    """Whether it answers them in Anthropic's."""
    return _ANTHROPIC_ROUTES.fullmatch(path) is not None


def error_response(path: str, error: CitadelError) -> web.Response:
    if speaks_openai(path):
        body = errors.openai_body(error)
    elif speaks_anthropic(path):
        body = errors.anthropic_body(error)
    else:
        body = errors.citadel_body(error)
    return json_response(body, status=error.row.status, headers=errors.headers(error))


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **(headers or {})}
    return web.Response(body=orjson.dumps(body), status=status, headers=headers)


@web.middleware
async def request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("X-Request-Id", "")
    id_ = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(16)
    request[REQUEST_ID] = id_
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=id_)
    return await handler(request)


@web.middleware
async def access_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    start = time.perf_counter()
    status = 499  # what is logged when the client goes before it is answered
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        account = request.get(ACCOUNT)
        log.info(
            "request",
            method=request.method,
            path=request.path,
            status=status,
            ms=round((time.perf_counter() - start) * 1000, 1),
            member=account.member if account else None,
        )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except CitadelError as error:
        answered = error
    except web.HTTPMethodNotAllowed as error:
        answered = _wrong_method(request, error.allowed_methods)
    except web.HTTPException:
        answered = NotFound()
    except ConnectionError:
        raise  # the client is gone; there is nobody to answer
    except Exception:
        log.exception("fault of the server")
        answered = Internal()
    request.app[SERVICES].metrics.refused(answered)
    return error_response(request.path, answered)


def _wrong_method(request: web.Request, allowed: set[str]) -> CitadelError:
    """Routes that ask a model tell any method that is not theirs the same."""
    if request.method in hdrs.METH_ALL or speaks_openai(request.path) or speaks_anthropic(request.path):
        return MethodNotAllowed(request.method, sorted(allowed | {"OPTIONS"}))
    return MethodNotImplemented(request.method)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """OPTIONS asks what a page from elsewhere may do; it needs no key, since it is the browser that asks."""
    if request.method != hdrs.METH_OPTIONS:
        return await handler(request)
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "Authorization, Content-Type")
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE, OPTIONS",
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
        hdrs.ACCESS_CONTROL_MAX_AGE: "86400",
    }
    return web.Response(status=204, headers=headers)


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams included, just before its headers go."""
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or secrets.token_hex(16)
    if speaks_anthropic(request.path):
        response.headers["request-id"] = response.headers["X-Request-Id"]  # the name that Anthropic's SDKs read
    asks_a_model = speaks_openai(request.path) or speaks_anthropic(request.path)
    if (account := request.get(ACCOUNT)) is not None and asks_a_model and request.method == "POST":
        response.headers.update(ratelimit.headers(request.app[SERVICES].ledger, account))
    origin, allowed = request.headers.get(hdrs.ORIGIN), request.app[SERVICES].config.server.cors_origins
    if origin is not None and ("*" in allowed or origin in allowed):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in allowed else origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        response.headers[hdrs.VARY] = hdrs.ORIGIN


MIDDLEWARES: Final = [request_id, access_log, answer_errors, preflight]
"""Outermost first."""
