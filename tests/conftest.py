"""What all tests share: the detector of calls that block the event loop, and servers over the replay engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from blockbuster import BlockBuster, blockbuster_ctx

from citadel import app, logs
from citadel.accounts.store import Store
from citadel.config import Config
from citadel.http.server import connections
from citadel.http.services import Services


@pytest.fixture(autouse=True, scope="session")
def logs_as_in_production() -> None:
    logs.configure()


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> Generator[BlockBuster]:
    """A call that blocks the event loop raises, in our code and in what that calls; tests may read their files."""
    with blockbuster_ctx(scanned_modules=["citadel", "engines"]) as detector:
        yield detector


def write_script(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    """A replay script; returns the model's `source`."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def make_config(folder: Path, models: Mapping[str, Mapping[str, Any]], **tables: Any) -> Config:
    """A configuration in `folder`; `server`, `limits` and `gpu` as keyword arguments."""
    server = {"data_dir": folder / "data", "cache_dir": folder / "cache", "port": 0, **tables.pop("server", {})}
    return Config.model_validate({"models": dict(models), "server": server, "folder": folder, **tables})


@dataclass(frozen=True)
class Serving:
    """A running server, a key for it, a session that sends the key, and what holds the server's connections."""

    url: str
    key: str
    services: Services
    session: aiohttp.ClientSession
    runner: web.AppRunner

    def chat(self, text: str = "hi", *, model: str | None = None, headers: Any = None, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        if model is not None:
            body["model"] = model
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)


@asynccontextmanager
async def serving(
    config: Config, *, scopes: Sequence[str] = ("llm", "admin"), port: int = 0, keep_alive: bool = True
) -> AsyncGenerator[Serving]:
    """The real application on a real socket; at the end nothing may be left held.

    `keep_alive`: whether the session keeps connections open between calls.
    """
    key = await asyncio.to_thread(_new_key, config, scopes)
    async with app.services(config) as services:
        runner = connections(app.build(services))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        headers = {"Authorization": f"Bearer {key}"}
        try:
            connector = aiohttp.TCPConnector(force_close=not keep_alive)
            async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
                yield Serving(f"http://127.0.0.1:{runner.addresses[0][1]}", key, services, session, runner)
        finally:
            await runner.cleanup()


def _new_key(config: Config, scopes: Sequence[str]) -> str:
    store = Store(config.server.data_dir)
    key = store.create_key("tester", frozenset(scopes))  # type: ignore[arg-type]
    store.close()
    return key.text


async def events_of(response: aiohttp.ClientResponse) -> tuple[list[dict[str, Any]], list[str]]:
    """The stream's JSON events and its comment lines; it must end with [DONE] and hold nothing else."""
    data: list[dict[str, Any]] = []
    comments: list[str] = []
    lines = (await response.text()).split("\n")
    for line in lines:
        if line.startswith(": "):
            comments.append(line[2:])
        elif line.startswith("data: "):
            if line != "data: [DONE]":
                data.append(json.loads(line[6:]))
        else:
            assert line == "", line
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return data, comments


async def first_event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The first JSON event of a stream that goes on."""
    async for line in response.content:
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream ended without an event")
