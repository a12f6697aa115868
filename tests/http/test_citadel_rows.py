"""Every row of the table of Citadel's own format, over HTTP, on every route that answers in it; and none missing.

A scenario brings one status about on one route, by what it does first or by how it asks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from citadel import app
from citadel.errors import CITADEL_CODES
from citadel.http import routes_gpu
from citadel.http.guard import Route
from citadel.http.middleware import speaks_anthropic, speaks_openai
from tests.conftest import Serving, make_config, serving, write_script

ROUTES = [each for each in app.ROUTES if not speaks_openai(each.path) and not speaks_anthropic(each.path)]
GUARDED = [route for route in ROUTES if route.scope is not None]
WITH_BODY = [route for route in ROUTES if route.body is not None]
OF_ONE_THING = [route for route in ROUTES if "{" in route.path]
LIMIT = 5_000


@dataclass
class Asking:
    """A request that would be answered well; a scenario spoils one thing of it."""

    server: Serving
    route: Route
    method: str
    path: str
    json: Any = None
    data: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])


Spoil = Callable[[Asking, pytest.MonkeyPatch], Awaitable[None]]


async def bad_request(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    if asking.route.query is not None:
        asking.path += "?no_such_parameter=1"
    else:
        asking.json = {"no_such_field": 1}


async def unauthorized(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    asking.headers["Authorization"] = "Bearer hlk_not_a_key"


async def forbidden(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    other = {"admin": ["llm", "gpu"], "gpu": ["llm", "admin"]}[str(asking.route.scope)]
    made = {"member": "ann", "scopes": other}
    async with asking.server.session.post(f"{asking.server.url}/admin/keys", json=made) as response:
        asking.headers["Authorization"] = f"Bearer {(await response.json())['key']}"


async def not_found(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    """The thing in the path does not exist; a path without one is made another path."""
    asking.path = asking.path if "{" in asking.route.path else "/no/such/path"


async def method_not_allowed(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    asking.method = "PATCH"


async def conflict(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    url, made = f"{asking.server.url}/admin/keys", {"member": "ann", "scopes": ["llm"]}
    async with asking.server.session.post(url, json=made) as response:
        id_ = (await response.json())["id"]
    async with asking.server.session.delete(f"{url}/{id_}") as response:
        assert response.status == 200
    asking.path = f"/admin/keys/{id_}/rotate"


async def too_large(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    asking.json = {"x": "y" * LIMIT}


async def unsupported_media_type(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    asking.json, asking.data, asking.headers["Content-Type"] = None, b"{}", "text/plain"


async def rate_limited(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(routes_gpu, "MAX_OPEN", 0)
    asking.json = {"kind": "image"}


async def internal(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    """A fault in what every one of these routes goes through."""

    async def fault(*_: Any) -> None:
        raise ZeroDivisionError("a fault that the test puts in")

    patch.setattr("citadel.http.guard.admit", fault)


async def not_implemented(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    asking.method = "PROPFIND"


async def unavailable(asking: Asking, patch: pytest.MonkeyPatch) -> None:
    async with asking.server.session.post(f"{asking.server.url}/admin/offline", json={"offline": True}) as response:
        assert response.status == 200


def on(*paths: str) -> list[Route]:
    return [route for route in ROUTES if (route.path, route.method) in {tuple(path.split()[::-1]) for path in paths}]


SCENARIOS: dict[str, tuple[Spoil, list[Route]]] = {
    "bad_request": (bad_request, [*WITH_BODY, *on("GET /admin/usage")]),
    "unauthorized": (unauthorized, GUARDED),
    "forbidden": (forbidden, GUARDED),
    "not_found": (not_found, ROUTES),
    "method_not_allowed": (method_not_allowed, ROUTES),
    "conflict": (conflict, on("POST /admin/keys/{id}/rotate")),
    "too_large": (too_large, WITH_BODY),
    "unsupported_media_type": (unsupported_media_type, WITH_BODY),
    "rate_limited": (rate_limited, on("POST /v1/gpu/leases")),
    "internal": (internal, GUARDED),
    "not_implemented": (not_implemented, ROUTES),
    "unavailable": (unavailable, on("GET /readyz")),
}
DETAIL = {"bad_request": "BadRequestError", "unavailable": "device_offline"}
"""Where the table of the LLM routes has a narrower code, `detail` says so."""


def test_no_row_is_missing() -> None:
    assert set(SCENARIOS) == set(CITADEL_CODES.values())
    assert all(routes for _, routes in SCENARIOS.values())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    settings = {"max_body_bytes": LIMIT, "drain_s": 0}
    config = make_config(tmp_path, {"m": {"engine": "replay", "source": source}}, server=settings)
    async with serving(config, scopes=["llm", "gpu", "admin"]) as running:
        yield running
        running.services.registry.check_integrity()


@pytest.mark.parametrize("code", SCENARIOS)
async def test_the_row_is_answered_as_the_table_says(server: Serving, code: str) -> None:
    spoil, routes = SCENARIOS[code]
    (status,) = [status for status, each in CITADEL_CODES.items() if each == code]
    for route in routes:
        body = {} if route.body is not None else None
        model = "m" if code != "not_found" else "nosuchmodel"
        path = re.sub(r"\{[^}]*\}", model if "/models/" in route.path else "nosuchid", route.path)
        asking = Asking(server, route, route.method, path, json=body)
        with pytest.MonkeyPatch.context() as patch:
            await spoil(asking, patch)
            url = server.url + asking.path
            sent = {"json": asking.json, "data": asking.data, "headers": asking.headers}
            async with server.session.request(asking.method, url, **sent) as response:
                told, headers = await response.json(), response.headers
        where = f"{asking.method} {asking.path}"
        assert response.status == status, f"{where}: {told}"
        check(told, headers, code, where)


def check(told: dict[str, Any], headers: Any, code: str, where: str) -> None:
    assert set(told) == {"ok", "error", "code", "message"} | ({"detail"} if "detail" in told else set()), where
    assert (told["ok"], told["code"], told["error"]) == (False, code, code.replace("_", "-")), where
    assert isinstance(told["message"], str), where
    assert told["message"], where
    assert told.get("detail", {}).get("code") == DETAIL.get(code), where
    assert ("Retry-After" in headers) is (code in ("rate_limited", "unavailable")), where
    if "Retry-After" in headers:
        assert int(headers["retry-after-ms"]) == min(int(headers["Retry-After"]) * 1000, 55_000), where
    assert headers.get("WWW-Authenticate") == ("Bearer" if code == "unauthorized" else None), where
    assert ("Allow" in headers) is (code == "method_not_allowed"), where
    assert headers["Content-Type"] == "application/json", where
    assert headers["Cache-Control"] == "no-store", where
    assert re.fullmatch("[0-9a-f]{32}", headers["X-Request-Id"]), where


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_the_list_of_models_has_the_rows_of_its_own(server: Serving, path: str) -> None:
    """In the OpenAI format, like all LLM routes: 401, 404, and 503 `device_offline`."""
    none = {"Authorization": "Bearer hlk_not_a_key"}
    async with server.session.get(server.url + path, headers=none) as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"], told["type"]) == (401, "invalid_api_key", "invalid_request_error")
    async with server.session.get(server.url + "/v1/models/none") as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"], told["model"]) == (404, "model_not_found", "none")
        assert told["available"] == ["m"]
    async with server.session.post(f"{server.url}/admin/offline", json={"offline": True}) as response:
        assert response.status == 200
    async with server.session.get(server.url + path) as response:
        told = (await response.json())["error"]
        assert (response.status, told["code"], told["type"]) == (503, "device_offline", "service_unavailable")
        assert response.headers["Retry-After"] == "60"


async def test_a_key_is_rotated_and_both_work(server: Serving) -> None:
    made = {"member": "ann", "scopes": ["llm"], "daily_calls": 5}
    async with server.session.post(f"{server.url}/admin/keys", json=made) as response:
        old = await response.json()
    url = f"{server.url}/admin/keys/{old['id']}/rotate"
    async with server.session.post(url, json={"overlap_hours": 1}) as response:
        new = await response.json()
        assert (response.status, set(new)) == (201, {"ok", "id", "key"})
    for key in (old["key"], new["key"]):
        async with server.chat(headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-limit-requests"] == "5"
    async with server.session.post(url) as response:
        assert response.status == 409
