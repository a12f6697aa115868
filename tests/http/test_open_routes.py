"""What can be read without a key gives nothing away of the server: not its models, members or keys, nor its paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from citadel import app
from tests.conftest import Serving, make_config, serving, write_script

NAMES = {"/page/{name}": ["index.html", "app.js", "nothing.js"], "/docs/{name}": ["errors", "errors.md", "nothing"]}
"""What the parameter of an open route is tried with."""


def config(folder: Path, model: str, **server: Any) -> Any:
    folder.mkdir()
    source = write_script(folder / "script.jsonl", [{"pieces": ["ok"]}])
    return make_config(folder, {model: {"engine": "replay", "source": source}}, server=server)


def open_paths() -> list[str]:
    """Of every route without a scope; whether `/metrics` is open, models.toml says."""
    found: list[str] = []
    for route in app.ROUTES:
        if route.scope is None and route.path != "/metrics":
            start, brace, _ = route.path.partition("{")
            found += [start + name for name in NAMES[route.path]] if brace else [start]
    return [*found, "/no/such/path"]


async def read(server: Serving, path: str, key: str | None) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}" if key else "none"}
    async with server.session.get(server.url + path, headers=headers) as response:
        return response.status, await response.read()


async def test_an_open_route_says_the_same_on_every_server_and_to_everybody(tmp_path: Path) -> None:
    one = config(tmp_path / "one", "a-model-of-one", owned_by="somebody")
    other = config(tmp_path / "other", "a-model-of-the-other", max_body_bytes=5000)
    async with serving(one) as first, serving(other) as second:
        async with first.chat() as response:
            assert response.status == 200
        for path in open_paths():
            told = await read(first, path, None)
            assert told == await read(first, path, first.key) == await read(second, path, None), path
            for secret in ("a-model-of-one", "tester", "somebody", str(tmp_path), first.key):
                assert secret.encode() not in told[1], path


@pytest.mark.parametrize("public", [False, True])
async def test_metrics_are_open_where_models_toml_says_so_and_name_no_member(tmp_path: Path, public: bool) -> None:
    async with serving(config(tmp_path / "one", "a-model-of-one", metrics_public=public)) as server:
        async with server.chat() as response:
            assert response.status == 200
        status, told = await read(server, "/metrics", None)
        assert status == (200 if public else 401)
        assert (b"a-model-of-one" in told) is public
        _, all_of_it = await read(server, "/metrics", server.key)
        assert b'citadel_calls_total{model="a-model-of-one"' in all_of_it
        for secret in ("tester", server.key, server.key[4:12], str(tmp_path)):
            assert secret.encode() not in all_of_it
