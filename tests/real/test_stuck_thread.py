"""A llama.cpp thread that hangs inside native code: it is given up, and its memory stays booked until it returns."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from citadel.runtime import closing, watchdog
from engines.llama_context import Context
from tests.conftest import Serving, make_config, serving
from tests.integrity import Delivered, drill
from tests.models.export import GGUF

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

LIBC = ctypes.CDLL(None)
SEMAPHORE_BYTES = 64
"""Room for glibc's `sem_t`, which takes 32."""


class NativeHang:
    """The next decode waits in C for a semaphore, where no signal, exception or cancellation reaches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        assert LIBC.sem_init(self._semaphore, 0, 0) == 0
        self.thread: threading.Thread | None = None
        decode = Context.decode

        def hanging(context: Context, *arguments: Any) -> int:
            if self.thread is None:
                self.thread = threading.current_thread()
                assert LIBC.sem_wait(self._semaphore) == 0
            return decode(context, *arguments)

        monkeypatch.setattr(Context, "decode", hanging)

    def let_go(self) -> None:
        assert LIBC.sem_post(self._semaphore) == 0


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(closing, "PATIENCE_S", 0.2)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Generator[NativeHang]:
    hanging = NativeHang(monkeypatch)
    yield hanging
    hanging.let_go()  # also where the test did not come so far


def config(folder: Path, ram_limit_gb: float) -> Any:
    model = {"engine": "llama", "source": str(GGUF), "slots": 2, "max_parallel": 8, "memory_gb": 1}
    models = {"m": {**model, "stall_s": 3}, "other": model}
    return make_config(folder, models, gpu={"ram_limit_gb": ram_limit_gb})


async def said(server: Serving, model: str, delivered: Delivered) -> dict[str, Any]:
    """The error, or nothing where the call was answered. One that fails before its first token counts for nothing."""
    async with server.chat(model=model, max_tokens=4) as response:
        body = await response.json()
        if response.status == 200:
            delivered.whole(body["usage"])
        return body.get("error", {})


@asynccontextmanager
async def drilled(config: Any) -> AsyncGenerator[tuple[Serving, Delivered]]:
    async with serving(config, keep_alive=False) as server:
        async with drill(server.session, server.url, os.getpid()) as delivered:
            yield server, delivered
        server.services.registry.check_integrity()


async def gone(server: Serving, thread: threading.Thread) -> None:
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    async with asyncio.timeout(60):
        while server.services.registry.stuck:
            await server.services.registry.considered()


async def test_the_model_is_loaded_again_beside_its_stuck_thread_where_it_fits(
    tmp_path: Path, hang: NativeHang
) -> None:
    async with drilled(config(tmp_path, 3.5)) as (server, delivered):
        assert (await said(server, "m", delivered))["code"] == "engine_restarted"
        assert await said(server, "other", delivered) == {}
        assert await said(server, "m", delivered) == {}
        assert hang.thread is not None
        assert hang.thread.is_alive()
        assert server.services.registry.stuck
        hang.let_go()
        await gone(server, hang.thread)
        assert await said(server, "m", delivered) == {}


async def test_the_model_is_refused_where_it_does_not_fit_beside_its_stuck_thread(
    tmp_path: Path, hang: NativeHang
) -> None:
    async with drilled(config(tmp_path, 1.5)) as (server, delivered):
        assert (await said(server, "m", delivered))["code"] == "engine_restarted"
        error = await said(server, "m", delivered)
        assert error["code"] == "insufficient_memory"
        assert error["reason"].endswith("1.00 GB are held by a stuck engine of m")
        assert hang.thread is not None
        hang.let_go()
        await gone(server, hang.thread)
        assert await said(server, "m", delivered) == {}
