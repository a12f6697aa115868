"""The registry's worker at its edges: what it measures, whom it forgets to look at, whom it unloads."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import EngineSpec, Need, Progress
from citadel.metrics import Metrics
from citadel.runtime import memory
from citadel.runtime.lifecycle import Lifecycle
from citadel.runtime.registry import Registry
from engines import adapter
from engines.replay import Replay, ReplayEngine
from tests.conftest import Serving, make_config, serving, write_script


def config(folder: Path, models: dict[str, dict[str, Any]], **gpu: Any) -> Any:
    source = write_script(folder / "script.jsonl", [{"pieces": ["ok"]}])
    return make_config(
        folder, {name: {"engine": "replay", "source": source, **keys} for name, keys in models.items()}, gpu=gpu
    )


async def answered(server: Serving, model: str) -> None:
    async with server.chat(model=model) as response:
        assert response.status == 200, await response.text()


async def in_state(server: Serving, model: str, state: str) -> None:
    async with asyncio.timeout(20):
        while server.services.registry.status(model).state != state:
            await server.services.registry.considered()


async def test_a_load_that_is_refused_does_not_hold_up_the_next_though_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, told = asyncio.Event(), Lifecycle._loaded

    def tell(*arguments: Any) -> None:
        told(*arguments)
        loaded.set()

    monkeypatch.setattr(Lifecycle, "_loaded", tell)
    models = {"giant": {"memory_gb": 3}, "small": {"memory_gb": 1}}
    async with serving(config(tmp_path, models, ram_limit_gb=2)) as server:
        for model in models:
            await server.services.registry.prepare(model)
        await server.services.registry.considered()
        for model in models:
            server.services.registry.load(model)
        async with asyncio.timeout(20):
            await loaded.wait()
        assert server.services.registry.status("small").state == "loaded"


async def test_what_was_measured_during_a_load_is_not_what_is_free_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker looks while `a` loads, and hears what is free when `a` is there: `b` does not fit beside it."""
    armed, measured, go_on = threading.Event(), threading.Event(), threading.Event()
    real = memory.free

    def held_up(*arguments: Any) -> Any:
        free = real(*arguments)
        if armed.is_set():
            armed.clear()
            measured.set()
            assert go_on.wait(20)
        return free

    monkeypatch.setattr(memory, "free", held_up)
    models = {"a": {"memory_gb": 1, "replay": {"load_s": 2}}, "b": {"memory_gb": 1}}
    async with serving(config(tmp_path, models, ram_limit_gb=1.5)) as server:
        first = asyncio.create_task(answered(server, "a"))
        await in_state(server, "a", "starting")
        armed.set()
        second = asyncio.create_task(answered(server, "b"))
        await asyncio.to_thread(measured.wait, 20)
        await first
        go_on.set()
        await second
        assert server.services.registry.status("a").state == "stopped"


async def test_what_a_media_job_has_taken_is_not_kept_for_it_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 GB are free: a job states 2 and takes them, and a model of 1 GB is loaded beside it."""
    free = 3
    monkeypatch.setattr(memory, "free", lambda *_: Need(ram=free * memory.GB))
    async with serving(config(tmp_path, {"a": {"memory_gb": 1}})) as server:
        registry = server.services.registry
        job = registry.leases.ask("image", 2 * memory.GB)
        await registry.leases.wait(job, 20)
        free = 1
        await answered(server, "a")
        registry.leases.release(job)


async def test_the_queue_goes_on_after_what_is_free_could_not_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, real = iter([OSError("the driver does not answer")] * 2), memory.free

    def unreliable(*arguments: Any) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return real(*arguments)

    async with serving(config(tmp_path, {"a": {}})) as server:
        monkeypatch.setattr(memory, "free", unreliable)
        await answered(server, "a")
    assert "the driver does not answer" in caplog.text


async def test_what_is_done_for_a_request_is_logged_with_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second call's model takes the place of the first one's, and a media job that of the second's."""
    first, second, third = (letter * 16 for letter in "abc")
    models = {"a": {"memory_gb": 1}, "b": {"memory_gb": 1}}
    with caplog.at_level("INFO", "citadel.registry"):
        async with serving(config(tmp_path, models, ram_limit_gb=1.5), scopes=("llm", "gpu")) as server:
            for model, id_ in (("a", first), ("b", second)):
                async with server.chat(model=model, headers={"X-Request-Id": id_}) as response:
                    assert response.status == 200
            body, headers = {"kind": "image", "wait_s": 20}, {"X-Request-Id": third}
            async with server.session.post(f"{server.url}/v1/gpu/leases", json=body, headers=headers) as response:
                lease = (await response.json())["id"]
            async with server.session.delete(f"{server.url}/v1/gpu/leases/{lease}") as response:
                assert response.status == 200
    lines: list[Any] = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
    told = [(line.get("model"), line.get("now", line["event"]), line.get("request_id")) for line in lines]
    done = [each for each in told if each[1] in ("loading", "Loaded", "Unloading", "Stopped", "lease granted")]
    assert done == [
        ("a", "loading", first),
        ("a", "Loaded", first),
        ("a", "Unloading", second),
        ("a", "Stopped", second),
        ("b", "loading", second),
        ("b", "Loaded", second),
        ("b", "Unloading", third),
        ("b", "Stopped", third),
        (None, "lease granted", third),
    ]


async def test_an_engine_that_dies_while_another_model_loads_is_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loaded again only when that load has ended, since what is free then was not known before."""
    go_on, load = asyncio.Event(), Replay.load

    async def held_up(spec: EngineSpec, progress: Progress) -> ReplayEngine:
        if spec.model == "slow":
            await go_on.wait()
        return await load(spec, progress)

    monkeypatch.setattr(Replay, "load", held_up)
    script = [{"when": "die", "pieces": ["x"], "fail": "die", "after": 1}, {"pieces": ["ok"]}]
    dies = write_script(tmp_path / "dies.jsonl", script)
    async with serving(config(tmp_path, {"dies": {"source": dies}, "slow": {}})) as server:
        registry = server.services.registry
        await answered(server, "dies")
        loading = asyncio.create_task(answered(server, "slow"))
        await in_state(server, "slow", "starting")
        async with server.chat("die", model="dies") as response:
            assert response.status == 502
        async with asyncio.timeout(20):
            while [task.get_name() for task in registry._lifecycle.operations] != ["load slow"]:
                await registry.considered()
        await registry.considered()
        assert registry.status("dies").state == "stopped"
        go_on.set()
        await in_state(server, "dies", "loaded")
        assert registry.status("slow").state == "loaded"
        await loading
        await answered(server, "dies")
        registry.check_integrity()


async def test_a_pinned_model_outlives_its_time_to_live(tmp_path: Path) -> None:
    models = {"pinned": {"memory_gb": 1, "ttl_s": 0, "pin": True}, "other": {"memory_gb": 1, "ttl_s": 0}}
    async with serving(config(tmp_path, models, ram_limit_gb=2)) as server:
        await answered(server, "pinned")
        await answered(server, "other")
        await in_state(server, "other", "stopped")
        assert server.services.registry.status("pinned").state == "loaded"
        server.services.registry.pin("pinned", pinned=False)
        await in_state(server, "pinned", "stopped")


async def test_what_is_due_does_not_keep_the_queue_spinning_while_nothing_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease has ended, and the look that would take note of it fails: it is tried again after a while."""

    def failing(*_: Any) -> Any:
        raise OSError("the driver does not answer")

    monkeypatch.setattr(memory, "free", failing)
    registry = Registry(config(tmp_path, {"a": {}}), adapter, Metrics(), learned={}, on_loaded=print)
    lease = registry.leases.ask("image", None)
    registry.leases.renew(lease)
    registry.leases._find(lease).expires_at = time.monotonic()
    assert registry._pause() == 0
    with pytest.raises(OSError, match="driver"):
        await registry._look()
    assert registry._pause() is None
