"""What this machine has, for people to read: processors, memory and GPUs. Blocking reads."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pynvml has no types

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from citadel.runtime import memory

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """Sizes in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes. `ram` is what this process may have at most: all there is, or its control group's limit.

    `cpus` may be used by this process. `gpu_problem`: why NVML does not tell, where it is there and fails.
    """

    system: str
    cpus: float
    ram_installed: int
    ram: int
    ram_free: int
    gpus: tuple[GpuDevice, ...]
    driver: str | None
    gpu_problem: str | None


def this() -> Machine:
    driver, devices, problem = None, (), None
    try:
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        devices = tuple(_devices())
    except pynvml.NVMLError as error:
        if not isinstance(error, pynvml.NVMLError_LibraryNotFound):  # type: ignore[attr-defined]
            problem = str(error)
    return Machine(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        cpus=_cpus(),
        ram_installed=psutil.virtual_memory().total,
        ram=memory.total().ram,
        ram_free=memory.measured_ram(),
        gpus=devices,
        driver=driver,
        gpu_problem=problem,
    )


def _devices() -> Iterator[GpuDevice]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        device: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
        sizes = pynvml.nvmlDeviceGetMemoryInfo(device)
        yield GpuDevice(str(pynvml.nvmlDeviceGetName(device)), int(sizes.total), int(sizes.free))


def _cpus() -> float:
    """Those that the scheduler may use, within the control group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return min(allowed, int(quota) / int(period)) if quota.isdigit() else allowed
