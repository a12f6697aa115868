"""What memory is free: RAM by psutil and the control group, GPU memory by NVML. Blocking reads; call in a thread."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pynvml has no types

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

import psutil
import pynvml

from citadel.engine import Need

GB: Final = 10**9
_CGROUP: Final = Path("/sys/fs/cgroup")


def free(booked: Iterable[Need], ram_limit_gb: float | None, gpu_limit_gb: float | None) -> Need:
    """Bytes that a load may take: what is measured as free, within the owner's limits less what is `booked`."""
    taken = list(booked)
    ram, gpu = measured_ram(), measured_gpu()
    if ram_limit_gb is not None:
        ram = min(ram, int(ram_limit_gb * GB) - sum(need.ram for need in taken))
    if gpu_limit_gb is not None:
        gpu = min(gpu, int(gpu_limit_gb * GB) - sum(need.gpu for need in taken))
    return Need(ram=max(ram, 0), gpu=max(gpu, 0))


def measured_ram() -> int:
    available = psutil.virtual_memory().available
    limit = _read(_CGROUP / "memory.max")
    used = _read(_CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, limit - used + _reclaimable())


def measured_gpu() -> int:
    """Free bytes over all devices; 0 on a box without NVML."""
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in _devices())


def has_gpu() -> bool:
    """Whether this box has a device that NVML knows."""
    return bool(_devices())


@cache
def _devices() -> tuple[object, ...]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    return tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))


def _reclaimable() -> int:
    """Page cache that the kernel drops before it kills anybody; the control group counts it as used."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
