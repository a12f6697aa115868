"""One server process on the checked-in models.toml, both real engines in it, for all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.process import ROOT, Process

MODELS = ("smollm2", "smollm2-vllm")


@dataclass(frozen=True)
class RealServer:
    process: Process
    url: str
    key: str


@pytest.fixture(scope="package")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealServer]:
    process = Process(tmp_path_factory.mktemp("real"), "--config", str(ROOT / "models.toml"))
    said = process.announcement()
    assert said.key is not None
    yield RealServer(process, said.url, said.key)
    assert process.stop() == 0


@pytest.fixture
async def session(real_server: RealServer) -> AsyncGenerator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {real_server.key}"}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(real_server.url, headers=headers, timeout=timeout) as opened:
        yield opened


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}
