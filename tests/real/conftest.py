"""The server processes that the tests of this folder share, both real engines in each.

`real_server` is on the checked-in models.toml; `tiny_server` on the small model of tests/models, which thinks and calls
tools, and makes embeddings beside that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.models.served import TINY_LLAMA, TINY_LLAMA_EMBED, TINY_VLLM, TINY_VLLM_EMBED, models_toml
from tests.process import ROOT, Process

MODELS = ("smollm2", "smollm2-vllm")
"""Those of `real_server`."""
ENGINES = ("llama", "hyperqwen")
"""The models of `tiny_server`; ENGINE-embed makes embeddings with the same weights."""

_TINY = models_toml(
    {
        "llama": {**TINY_LLAMA, "slots": 8},
        "llama-embed": TINY_LLAMA_EMBED,
        "hyperqwen": {**TINY_VLLM, "slots": 16},
        "hyperqwen-embed": {**TINY_VLLM_EMBED, "slots": 4},
    },
    server={"wait_s": 900},  # a busy machine may take minutes to start vLLM
)


@dataclass(frozen=True)
class RealServer:
    process: Process
    url: str
    key: str

    @property
    def pid(self) -> int:
        return self.process.process.pid


@contextmanager
def started(folder: Path, models: str) -> Generator[RealServer]:
    """A server on `models`, the text of its models.toml; its end must be an orderly one."""
    (folder / "models.toml").write_text(models, encoding="utf-8")
    process = Process(folder)
    said = process.announcement()
    assert said.key is not None
    yield RealServer(process, said.url, said.key)
    assert process.stop() == 0


@asynccontextmanager
async def connected(server: RealServer) -> AsyncGenerator[aiohttp.ClientSession]:
    """A session that keeps no connection open between calls, so that open descriptors can be told apart.

    Its calls wait for a model as long as a load may take on a busy machine.
    """
    headers = {"Authorization": f"Bearer {server.key}", "X-LLM-Wait": "280"}
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(server.url, headers=headers, timeout=timeout, connector=connector) as opened:
        yield opened


@pytest.fixture(scope="package")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealServer]:
    models = (ROOT / "models.toml").read_text(encoding="utf-8")
    with started(tmp_path_factory.mktemp("real"), models) as server:
        yield server


@pytest.fixture
async def session(real_server: RealServer) -> AsyncGenerator[aiohttp.ClientSession]:
    async with connected(real_server) as opened:
        yield opened


@pytest.fixture(scope="package")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealServer]:
    with started(tmp_path_factory.mktemp("tiny"), _TINY) as server:
        yield server


@pytest.fixture
async def client(tiny_server: RealServer) -> AsyncGenerator[aiohttp.ClientSession]:
    async with connected(tiny_server) as opened:
        yield opened


@asynccontextmanager
async def running(folder: Path, models: str) -> AsyncGenerator[tuple[RealServer, aiohttp.ClientSession]]:
    """A server of a test's own, started or, in the same folder, started again; the test may have killed it."""
    (folder / "models.toml").write_text(models, encoding="utf-8")
    process = Process(folder)
    said = await asyncio.to_thread(process.announcement)
    key = folder / "key"
    if said.key is not None:
        key.write_text(said.key, encoding="utf-8")
    server = RealServer(process, said.url, key.read_text(encoding="utf-8"))
    try:
        async with connected(server) as session:
            yield server, session
    finally:
        if process.process.poll() is None:
            process.process.terminate()
        await asyncio.to_thread(process.wait)


def engines_of(server: RealServer) -> list[psutil.Process]:
    """The processes of vLLM's engines. One that has ended but for its entry has no command any more."""
    found: list[psutil.Process] = []
    for child in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if "EngineCore" in " ".join(child.cmdline()) else []
    return found


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}
