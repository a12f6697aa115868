"""`/openapi.json`: the API in OpenAPI 3.1, made of the routes, the models of their bodies and the table of errors.

A route joins by being in the table that `route` is given; what it may answer follows from its fields.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from citadel import errors
from citadel.errors import ANTHROPIC_TYPES, CITADEL_CODES, TABLE, CitadelError
from citadel.http.guard import Route
from citadel.http.middleware import speaks_anthropic, speaks_openai

Json = dict[str, Any]

_OF_A_BODY: Final = (
    errors.InvalidJson,
    errors.BadBody,
    errors.BadRequest,
    errors.TooLarge,
    errors.UnsupportedMediaType,
)
_OF_NO_GENERATION: Final = {errors.NotFound, errors.MethodNotAllowed, errors.MethodNotImplemented, errors.Conflict}
_OF_A_GENERATION: Final = tuple(kind for kind in TABLE if kind not in _OF_NO_GENERATION)
_PARAMETER: Final = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_FIELDS: Final[dict[str, Json]] = {
    "available": {"type": "array", "items": {"type": "string"}},
    "limit": {"type": "integer"},
    "max_parallel": {"type": "integer"},
    "param": {"type": ["string", "null"]},
    "position": {"type": "integer"},
    "retry_after_s": {"type": "integer"},
    "used": {"type": "integer"},
}
"""The extra fields of errors that are not strings."""
MEANINGS: Final[dict[type[CitadelError], str]] = {
    errors.InvalidJson: "The body is not a JSON object",
    errors.BadBody: "The body could not be read: the connection or its encoding broke, or it took over 60 s",
    errors.BadHeader: "A header of the request has a value that it cannot have",
    errors.BadRequest: "A field of the body has a value that the API, or the model, rejects; `param` names it",
    errors.ContextLengthExceeded: "The prompt leaves no room for an answer in the model's context",
    errors.ParallelUnsupported: "The model runs one request at a time per member, and the member has one running",
    errors.TooManyParallel: "The member runs `max_parallel` requests on the model already",
    errors.MissingApiKey: "There is no `Authorization` header",
    errors.InvalidApiKey: "The key is unknown, revoked or expired, or the scheme is not `Bearer`",
    errors.InsufficientScope: "The key does not carry the scope that the route needs",
    errors.NotFound: "There is no such route, or nothing with this name",
    errors.ModelNotFound: "`model` is not an installed model, or not one that the key may use",
    errors.MethodNotAllowed: "The route does not take this method; `Allow` names those that it takes",
    errors.Conflict: "What is asked for does not go with how things are",
    errors.MethodNotImplemented: "The method has no meaning on any route",
    errors.TooLarge: "The body is over `max_body_bytes`, counted after decompression",
    errors.UnsupportedMediaType: "The `Content-Type` is not `application/json`",
    errors.DailyLimit: "The key's calls of this UTC day are used up",
    errors.RateLimited: "The key's calls in 60 seconds, or in 24 hours, are used up",
    errors.DailyTokens: "The member's tokens of this UTC day are used up",
    errors.TooManyStreams: "The member has as many requests open as it may",
    errors.Internal: "A fault of the server; its log has the request id",
    errors.EngineRestarted: "The model stopped answering and is loaded again; the request ended",
    errors.LlmUnavailable: "The model cannot be started: its weights are missing, or its last start failed",
    errors.EdgeError: "The engine returned something that is no valid answer",
    errors.ModelLoading: "The model is loading, and the request's time to wait is over",
    errors.Queued: "The model's load waits for the GPU behind others, and the request's time to wait is over",
    errors.GpuBusy: "Media jobs held the GPU for longer than `busy_after_s`",
    errors.InsufficientMemory: "The model does not fit, even with all unloaded that may be",
    errors.DeviceOffline: "The service was taken offline, or the server is ending",
    errors.DeviceBusy: "As many requests are open, over all callers, as the server takes",
}
"""What each error says, in a line; for this document and the pages at `/docs`."""
_HEADERS: Final[dict[str, Json]] = {
    "X-Request-Id": {"schema": {"type": "string", "pattern": "^[0-9a-f]{16,64}$"}},
    "Retry-After": {"description": "Seconds", "schema": {"type": "integer"}},
    "WWW-Authenticate": {"schema": {"const": "Bearer"}},
}


def route(routes: Sequence[Route]) -> Route:
    """The route that serves the document of `routes`, and of itself."""

    @cache
    def body() -> bytes:
        return orjson.dumps(document((*routes, served)))

    async def openapi(_request: web.Request) -> web.Response:
        """This document."""
        return web.Response(body=await asyncio.to_thread(body), content_type="application/json")

    served = Route("GET", "/openapi.json", openapi, None)
    return served


def document(routes: Sequence[Route]) -> Json:
    bodies = sorted({each.body for each in routes if each.body is not None}, key=lambda model: model.__qualname__)
    names, schemas = _schemas(bodies)
    paths: defaultdict[str, Json] = defaultdict(dict)
    for each in routes:
        paths[_path(each)][each.method.lower()] = _operation(each, names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Citadel", "version": version("citadel"), "description": "Pages with examples are at /docs."},
        "externalDocs": {"url": "/docs"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": _HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "hlk_<id>_<secret>"}},
        },
    }


def failures(each: Route) -> list[type[CitadelError]]:
    """Every error that the route may answer with, in the order of the table."""
    found: set[type[CitadelError]] = {errors.Internal, *each.raises}
    if each.scope is not None:
        found |= {errors.MissingApiKey, errors.InvalidApiKey}
    if each.scope not in (None, "any"):
        found.add(errors.InsufficientScope)
    if each.scope in ("llm", "any"):
        found.add(errors.DeviceOffline)
    if each.scope == "llm":
        found.update(_OF_A_GENERATION)
    if each.body is not None:
        found.update(_OF_A_BODY)
    if _PARAMETER.search(each.path) and not speaks_openai(each.path):
        found.add(errors.NotFound)
    return [kind for kind in TABLE if kind in found]


def _path(each: Route) -> str:
    return _PARAMETER.sub(r"{\1}", each.path)


def _operation(each: Route, names: dict[type[BaseModel], str]) -> Json:
    responses: Json = {str(each.status): _success(each)}
    by_status: defaultdict[int, list[type[CitadelError]]] = defaultdict(list)
    for kind in failures(each):
        by_status[TABLE[kind].status].append(kind)
    for status, kinds in sorted(by_status.items()):
        responses[str(status)] = _failure(each, status, kinds)
    name = each.handler.__name__
    operation: Json = {
        "operationId": re.sub(r"\W+", "_", f"{each.method.lower()} {_path(each)}".replace("}", "")),
        "summary": (each.handler.__doc__ or name.replace("_", " ").capitalize())
        .split("\n")[0]
        .split(". ")[0]
        .rstrip("."),
        "parameters": list(_parameters(each)),
        "responses": responses,
        "security": [] if each.scope is None else [{"key": []}],
    }
    if each.body is not None:
        schema = {"$ref": f"#/components/schemas/{names[each.body]}"}
        operation["requestBody"] = {
            "required": each.scope == "llm" or any(field.is_required() for field in each.body.model_fields.values()),
            "content": {"application/json": {"schema": schema}},
        }
    if each.scope is not None:
        operation["x-scope"] = each.scope
    return operation


def _parameters(each: Route) -> Iterator[Json]:
    for name in _PARAMETER.findall(each.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    if each.query is not None:
        schema = each.query.model_json_schema()
        for name, property_ in schema["properties"].items():
            required = name in schema.get("required", ())
            yield {"name": name, "in": "query", "required": required, "schema": property_}
    if each.scope == "llm":
        yield {"name": "X-LLM-Wait", "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0}}
    pattern = {"type": "string", "pattern": "^[0-9a-f]{16,64}$"}
    yield {"name": "X-Request-Id", "in": "header", "required": False, "schema": pattern}


_CONTENT: Final[dict[str, Json]] = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}


def _success(each: Route) -> Json:
    streams = each.body is not None and "stream" in each.body.model_fields
    types = (*each.content, "text/event-stream") if streams else each.content
    content = {type_: _CONTENT.get(type_, {"schema": {"type": "string"}}) for type_ in types}
    return {"description": "The answer", "headers": _headers("X-Request-Id"), "content": content}


def _failure(each: Route, status: int, kinds: Sequence[type[CitadelError]]) -> Json:
    rows = [TABLE[kind] for kind in kinds]
    names = ["X-Request-Id"]
    if status in (429, 503):
        names.append("Retry-After")
    if status == 401:
        names.append("WWW-Authenticate")
    if speaks_openai(each.path):
        shapes = [_openai(row) for row in rows]
    elif speaks_anthropic(each.path):
        shapes = [_anthropic(row) for row in rows]
    else:
        shapes = [_citadel(status)]
    return {
        "description": "\n\n".join(f"{TABLE[kind].code}: {MEANINGS[kind]}" for kind in kinds),
        "headers": _headers(*names),
        "content": {"application/json": {"schema": shapes[0] if len(shapes) == 1 else {"anyOf": shapes}}},
    }


def _headers(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _openai(row: errors.Row) -> Json:
    properties = {"message": {"type": "string"}, "type": {"const": row.type}, "code": {"const": row.code}}
    properties |= {name: _FIELDS.get(name, {"type": "string"}) for name in row.fields}
    return _object({"error": _object(properties)})


def _anthropic(row: errors.Row) -> Json:
    type_ = ANTHROPIC_TYPES.get(row.status, "invalid_request_error")
    properties = {"type": {"const": type_}, "message": {"type": "string"}, "code": {"const": row.code}}
    properties |= {name: _FIELDS.get(name, {"type": "string"}) for name in row.fields}
    return _object({"type": {"const": "error"}, "error": _object(properties)})


def _citadel(status: int) -> Json:
    code = CITADEL_CODES.get(status, "unavailable")
    properties: Json = {
        "ok": {"const": False},
        "error": {"const": code.replace("_", "-")},
        "code": {"const": code},
        "message": {"type": "string"},
    }
    shape = _object(properties)
    shape["properties"]["detail"] = {"type": "object"}
    return shape


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _schemas(models: Sequence[type[BaseModel]]) -> tuple[dict[type[BaseModel], str], Json]:
    """The name of each model's schema, and all schemas by their names."""
    template = "#/components/schemas/{model}"
    refs, whole = models_json_schema([(model, "validation") for model in models], ref_template=template)
    names = {model: refs[model, "validation"]["$ref"].rpartition("/")[2] for model in models}
    return names, whole.get("$defs", {})
