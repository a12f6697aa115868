"""What is free: pynvml itself on a stand-in driver, a few lines of C; control groups in a folder; limits, bookings."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

import engines
from citadel.engine import EngineSpec, Need
from citadel.runtime import memory
from engines.replay import Replay
from tests.conftest import Serving, make_config, serving, write_script
from tests.process import ROOT

GB = 10**9
DRIVER = r"""
#include <stdlib.h>
#include <string.h>

/* STAND_IN_FREE_GB: a figure per device, with commas. STAND_IN_FAILS: names of functions that return STAND_IN_CODE. */
struct memory { unsigned long long total, free, used; };

static const char *figures(void) { const char *text = getenv("STAND_IN_FREE_GB"); return text ? text : ""; }

static int result_of(const char *name) {
  const char *failing = getenv("STAND_IN_FAILS"), *code = getenv("STAND_IN_CODE");
  return failing && strstr(failing, name) ? atoi(code ? code : "999") : 0;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return result_of("Init"); }
int nvmlInit_v2(void) { return result_of("Init"); }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  const char *text = figures();
  *count = *text != 0;
  for (; *text; text++) *count += *text == ',';
  return result_of("Count");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(size_t)(index + 1);
  return result_of("Handle");
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  const char *text = figures();
  for (size_t index = (size_t)device; index > 1; index--) text = strchr(text, ',') + 1;
  memory->free = (unsigned long long)(atof(text) * 1e9);
  memory->total = memory->free + 1000000000ULL;
  memory->used = 1000000000ULL;
  return result_of("Memory");
}

const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "stand-in error"; }
"""
GPU_IS_LOST, DRIVER_NOT_LOADED = "15", "9"


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libnvidia-ml.so.1"
    source.write_text(DRIVER, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Nothing of an NVML met in one test is remembered in another."""

    def forget() -> None:
        memory._devices.cache_clear()
        memory._tell_once.cache_clear()

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    forget()
    yield
    forget()


@pytest.fixture
def gpus(driver: Path, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the stand-in says; pynvml has found it already."""
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(driver)))

    def say(free_gb: str, *, fails: str = "", code: str = GPU_IS_LOST) -> None:
        for name, value in {"FREE_GB": free_gb, "FAILS": fails, "CODE": code}.items():
            monkeypatch.setenv(f"STAND_IN_{name}", value)

    return say


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """A box with that much RAM available, and no control group."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "no group")

    def say(available: int) -> None:
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))

    return say


def errors_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.msg) for record in caplog.records if record.name == "citadel.memory"]


# -- NVML


def test_pynvml_finds_the_driver_as_the_linker_does(driver: Path) -> None:
    code = "from citadel.runtime import memory; print(memory.has_gpu(), memory.measured_gpu())"
    environment = {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": str(ROOT), "STAND_IN_FREE_GB": "7.5,2"}
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["True", str(int(9.5 * GB))]
    assert told.stderr == ""


def test_what_all_devices_have_free_is_added_up_and_read_anew(gpus: Callable[..., None]) -> None:
    gpus("3,4")
    assert memory.has_gpu()
    assert memory.measured_gpu() == 7 * GB
    gpus("3,1")
    assert memory.measured_gpu() == 4 * GB


def test_without_nvml_ram_is_all_there_is_and_nothing_is_complained_of(
    forgetful: None, monkeypatch: pytest.MonkeyPatch, ram: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    def none_there(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", none_there)
    ram(5 * GB)
    assert not memory.has_gpu()
    assert memory.free([], None, None) == Need(ram=5 * GB, gpu=0)
    assert not errors_told(caplog)


@pytest.mark.parametrize("call", ["Init", "Count", "Handle"])
def test_a_driver_that_does_not_start_is_no_gpu_and_is_told_once(
    call: str, gpus: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpus("5", fails=call, code=DRIVER_NOT_LOADED)
    for _ in range(3):
        assert not memory.has_gpu()
        assert memory.measured_gpu() == 0
    assert len(errors_told(caplog)) == 1


def test_a_driver_without_devices_is_no_gpu(gpus: Callable[..., None]) -> None:
    gpus("")
    assert not memory.has_gpu()
    assert memory.measured_gpu() == 0


def test_a_gpu_that_is_lost_while_we_run_counts_as_full_and_is_told_once(
    gpus: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    gpus("5")
    assert memory.measured_gpu() == 5 * GB
    gpus("5", fails="Memory")
    for _ in range(3):
        assert memory.measured_gpu() == 0
    assert memory.has_gpu(), "its models are still on it, and RAM is not what media jobs share"
    (told,) = errors_told(caplog)
    assert "GPU is lost" in told
    gpus("5")
    assert memory.measured_gpu() == 5 * GB


# -- limits, bookings, control groups


def test_limits_bind_less_what_is_booked_and_what_is_measured_binds_too(
    gpus: Callable[..., None], ram: Callable[[int], None]
) -> None:
    gpus("50")
    ram(30 * GB)
    booked = [Need(ram=1 * GB, gpu=6 * GB), Need(ram=2 * GB)]
    assert memory.free(booked, None, None) == Need(ram=30 * GB, gpu=50 * GB)
    assert memory.free(booked, 8, 20) == Need(ram=5 * GB, gpu=14 * GB)
    assert memory.free(booked, 2, 2) == Need(ram=0, gpu=0)
    assert memory.free(booked, 80, 90) == Need(ram=30 * GB, gpu=50 * GB)


def group(folder: Path, version: int, limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 2: ("max", "current", "inactive_file")}
    limit_file, used_file, cache_name = names[version]
    (folder / f"memory.{limit_file}").write_text(f"{limit}\n")
    (folder / f"memory.{used_file}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache_name} {cached}\nactive_file 7\n")


V2, V1 = "0::/system.slice/citadel.service\n", "9:name=systemd:/\n4:cpu,memory:/docker/x\n0::/\n"


@pytest.mark.parametrize(
    ("own", "groups", "free_gb"),
    [
        pytest.param("0::/\n", {"": (2, "10", 4, 1)}, 7, id="the limit of a container is the root's"),
        pytest.param(V2, {"system.slice/citadel.service": (2, "6", 4, 0)}, 2, id="a service has its own"),
        pytest.param(
            V2,
            {"system.slice": (2, "9", 8, 0), "system.slice/citadel.service": (2, "6", 4, 0)},
            1,
            id="the tightest of those above binds",
        ),
        pytest.param(V2, {"system.slice/citadel.service": (2, "max", 4, 0)}, 20, id="no limit"),
        pytest.param(V1, {"memory/docker/x": (1, "5", 3, 1)}, 3, id="version 1"),
        pytest.param(V1, {"memory": (1, "8", 3, 0)}, 5, id="version 1 in a container, under a path of the host"),
        pytest.param(V1, {}, 20, id="no control groups"),
        pytest.param(None, {"": (2, "10", 4, 0)}, 6, id="no list of one's own groups"),
        pytest.param("0::/\n", {"": (2, "3", 4, 0)}, 0, id="over its limit"),
    ],
)
def test_control_groups_bind(
    own: str | None,
    groups: dict[str, tuple[int, str, int, int]],
    free_gb: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ram: Callable[[int], None],
) -> None:
    ram(20 * GB)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    if own is not None:
        (tmp_path / "own").write_text(own)
    for path, (version, limit, used, cached) in groups.items():
        bytes_ = limit if limit == "max" else str(int(limit) * GB)
        group(tmp_path / "cgroup" / path, version, bytes_, used * GB, cached * GB)
    assert memory.free([], None, None).ram == free_gb * GB


# -- over HTTP


class OnGpu(Replay):
    """A fake: the replay engine, but it claims its `memory_gb` of the GPU, unless the model is named `ram`."""

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        return Need(ram=1) if spec.model == "ram" else Need(gpu=spec.memory_bytes or 0)


@pytest.fixture
def config(tmp_path: Path, gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setitem(engines.CATALOGUE, "replay", f"{__name__}:{OnGpu.__name__}")  # type: ignore[arg-type]
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])

    def make(**gpu: Any) -> Any:
        models = {name: {"engine": "replay", "source": source, "memory_gb": 6} for name in ("m", "ram")}
        return make_config(tmp_path, models, gpu=gpu)

    return make


async def refusal(server: Serving, *, stream: bool) -> tuple[int, dict[str, Any]]:
    async with server.chat(model="m", stream=stream) as response:
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("free_gb", "limit_gb", "told"), [("2,3", None, "5.00"), ("50", 4.5, "4.50")])
async def test_too_little_gpu_memory_is_told_with_both_numbers(
    config: Callable[..., Any],
    gpus: Callable[..., None],
    free_gb: str,
    limit_gb: float | None,
    told: str,
    stream: bool,
) -> None:
    gpus(free_gb)
    async with serving(config(memory_limit_gb=limit_gb)) as server:
        status, error = await refusal(server, stream=stream)
        assert (status, error["code"]) == (503, "insufficient_memory")
        assert error["reason"] == f"needs 6.00 GB of GPU memory, {told} GB can be made free"
        assert error["reason"] in error["message"]


async def test_a_gpu_that_is_lost_takes_nobody_down(config: Callable[..., Any], gpus: Callable[..., None]) -> None:
    gpus("50")
    async with serving(config()) as server:
        gpus("50", fails="Memory")
        status, error = await refusal(server, stream=False)
        assert (status, error["code"]) == (503, "insufficient_memory")
        assert "0.00 GB can be made free" in error["reason"]
        async with server.chat(model="ram") as response:
            assert response.status == 200
        gpus("50")
        async with server.chat(model="m") as response:
            assert response.status == 200
