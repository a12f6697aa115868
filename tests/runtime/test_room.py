"""What a load may count on, and that an engine which places its weights is asked again when the memory has changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

import engines
from citadel.engine import Engine, EngineSpec, Need, Progress
from citadel.runtime import memory
from citadel.runtime.gpu_queue import Resident
from citadel.runtime.installed import room
from engines.replay import Replay
from tests.conftest import make_config, serving, write_script

GB = 10**9


class Fitting(Replay):
    """A fake: the replay engine, but it takes nine tenths of whatever room it has."""

    loads: ClassVar[list[Need | None]] = []

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        assert spec.room is not None
        return Need(ram=spec.room.ram // 10 * 9, fitted=True)

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> Engine:
        Fitting.loads.append(spec.room)
        return await Replay.load(spec, progress)


def resident(model: str, need: Need, *, pinned: bool = False) -> Resident:
    return Resident(model, need, False, False, False, pinned, since=0.0, last_used=0.0, expires_at=None)


def config(tmp_path: Path, **gpu: Any) -> Any:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    return make_config(tmp_path, {"m": {"engine": "replay", "source": source}}, gpu=gpu)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    sizes = {"ram": 50 * GB, "gpu": 20 * GB}
    monkeypatch.setattr(memory, "measured_ram", lambda: sizes["ram"])
    monkeypatch.setattr(memory, "measured_gpu", lambda: sizes["gpu"])
    return sizes


def test_room_is_what_is_free_and_what_may_go(tmp_path: Path, free: dict[str, int]) -> None:
    idle, pinned = resident("idle", Need(3 * GB, 4 * GB)), resident("kept", Need(5 * GB, 6 * GB), pinned=True)
    assert room(config(tmp_path), [idle, pinned]) == Need(53 * GB, 24 * GB)
    limited = config(tmp_path, ram_limit_gb=20, memory_limit_gb=12)
    assert room(limited, [idle, pinned]) == Need(15 * GB, 6 * GB)


def test_room_that_cannot_be_measured_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> int:
        raise OSError("the driver does not answer")

    monkeypatch.setattr(memory, "measured_ram", failing)
    assert room(config(tmp_path), []) is None


async def test_a_load_is_planned_anew_for_the_memory_of_its_time(
    tmp_path: Path, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.CATALOGUE, "replay", f"{__name__}:{Fitting.__name__}")  # type: ignore[arg-type]
    Fitting.loads.clear()
    async with serving(config(tmp_path)) as server:
        registry = server.services.registry
        for size in (50 * GB, 30 * GB):
            free["ram"] = size
            async with server.chat() as response:
                assert response.status == 200
            registry.unload("m")
            async with asyncio.timeout(20):
                while registry.status("m").state != "stopped":
                    await registry.considered()
    assert [each.ram for each in Fitting.loads if each] == [50 * GB, 30 * GB]


async def test_a_plan_that_no_longer_fits_is_made_again_before_it_is_refused(
    tmp_path: Path, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.CATALOGUE, "replay", f"{__name__}:{Fitting.__name__}")  # type: ignore[arg-type]
    async with serving(config(tmp_path)) as server:
        await server.services.registry.prepare("m")
        free["ram"] = 10 * GB
        async with server.chat() as response:
            assert response.status == 200


async def test_what_fits_no_room_is_refused_each_time(
    tmp_path: Path, free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.CATALOGUE, "replay", f"{__name__}:{Fitting.__name__}")  # type: ignore[arg-type]
    monkeypatch.setattr(Fitting, "need", staticmethod(lambda spec: Need(ram=spec.room.ram * 2, fitted=True)))
    async with serving(config(tmp_path)) as server:
        for _ in range(2):
            async with server.chat() as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (503, "insufficient_memory")
            assert error["reason"] == "needs 100.00 GB of RAM, 50.00 GB can be made free"
