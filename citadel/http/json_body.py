"""The body of a request in the Citadel format, checked against a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from citadel.errors import BadRequest, UnsupportedMediaType
from citadel.http.services import SERVICES
from citadel.wire.request import parse_json

M = TypeVar("M", bound=BaseModel)


class Body(BaseModel):
    """Unlike an OpenAI body, one of ours is refused when it has a field that does not exist."""

    model_config = ConfigDict(extra="forbid", frozen=True)


async def read(request: web.Request, model: type[M]) -> M:
    """Raises what reading a body raises, and BadRequest with the field's name. No body at all is an empty object."""
    raw = await request.app[SERVICES].bodies.read(request)
    if raw and request.content_type != "application/json":
        raise UnsupportedMediaType
    return _checked(model, parse_json(raw) if raw else {})


def query(request: web.Request, model: type[M]) -> M:
    """What stands behind the question mark. Raises BadRequest with the parameter's name."""
    return _checked(model, dict(request.query))


def _checked(model: type[M], given: dict[str, Any]) -> M:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise BadRequest(f"{name}: {problem['msg'][0].lower()}{problem['msg'][1:]}", param=name) from None
