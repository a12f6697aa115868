"""`/openapi.json`: every route is in it with its errors, and what the server answers is what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest

from citadel import app, errors
from citadel.errors import TABLE
from citadel.http import openapi
from citadel.http.guard import Route
from citadel.wire.request import ChatBody
from tests.conftest import make_config, serving, write_script

DOCUMENT = openapi.document(app.ROUTES)


def operation(route: Route) -> dict[str, Any]:
    path = openapi._path(route)
    return DOCUMENT["paths"][path][route.method.lower()]


@pytest.mark.parametrize("route", app.ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_route_is_in_the_document_with_its_errors(route: Route) -> None:
    told = operation(route)
    for kind in openapi.failures(route):
        told_of = told["responses"][str(TABLE[kind].status)]["description"].split("\n\n")
        assert f"{TABLE[kind].code}: {openapi.MEANINGS[kind]}" in told_of
    assert (told["security"] == []) is (route.scope is None)
    assert ("requestBody" in told) is (route.body is not None)
    assert {each["name"] for each in told["parameters"] if each["in"] == "path"} == set(
        openapi._PARAMETER.findall(route.path)
    )


def test_nothing_else_is_in_the_document() -> None:
    told = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert told == {(openapi._path(route), route.method.lower()) for route in app.ROUTES}
    ids = [each["operationId"] for item in DOCUMENT["paths"].values() for each in item.values()]
    assert len(ids) == len(set(ids))


def test_a_route_that_reads_a_body_says_which() -> None:
    """A handler that names one of the two readers takes a body; its route must have the model."""
    for route in app.ROUTES:
        names = route.handler.__code__.co_names  # type: ignore[attr-defined]
        if "json_body" in names and "read" in names:
            assert route.body is not None, route.path


def test_a_chat_may_fail_in_every_way_of_the_table_but_those_of_other_routes() -> None:
    (chat,) = [route for route in app.ROUTES if route.path == "/v1/chat/completions"]
    others = {errors.NotFound, errors.MethodNotAllowed, errors.MethodNotImplemented, errors.Conflict}
    assert set(openapi.failures(chat)) == set(TABLE) - others
    schema = DOCUMENT["components"]["schemas"]["ChatBody"]
    assert set(schema["properties"]) == set(ChatBody.model_fields)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)

    def references(node: Any) -> list[str]:
        if isinstance(node, list):
            return [found for each in node for found in references(each)]
        if not isinstance(node, dict):
            return []
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for each in node.values() for found in references(each)]

    for reference in references(DOCUMENT):
        node: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


async def test_it_is_served_without_a_key(tmp_path: Path) -> None:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    async with serving(make_config(tmp_path, {"m": {"engine": "replay", "source": source}})) as server:
        async with aiohttp.ClientSession() as session, session.get(server.url + "/openapi.json") as response:
            assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
            assert await response.json() == DOCUMENT
