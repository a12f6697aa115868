"""What memory is free: RAM by psutil and the control groups, GPU memory by NVML. Blocking reads; call in a thread."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pynvml has no types

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, Literal

import psutil
import pynvml
import structlog

from citadel.engine import Need

log = structlog.get_logger("citadel.memory")

GB: Final = 10**9
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_GROUP_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of version 2, then 1: limit, use, and the page cache in it, which the kernel drops before it kills anybody."""


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
    return min([psutil.virtual_memory().available, *(left for group in _groups() for left in _left_in(group))])


def measured_gpu() -> int:
    """Free bytes over all devices; 0 on a box without NVML, and for a device that can no longer be asked."""
    return sum(_on(device, "free") for device in _devices())


def total() -> Need:
    """Bytes that this process could have if nothing else ran."""
    limits = [_read(group / names[0]) for group in _groups() for names in _GROUP_FILES]
    ram = min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])
    return Need(ram=ram, gpu=sum(_on(device, "total") for device in _devices()))


def has_gpu() -> bool:
    """Whether this box has a device that NVML knows."""
    return bool(_devices())


@cache
def _devices() -> tuple[object, ...]:
    try:
        pynvml.nvmlInit()
        return tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        if not isinstance(error, pynvml.NVMLError_LibraryNotFound):  # type: ignore[attr-defined]
            _tell_once(str(error))
        return ()


def _on(device: object, which: Literal["free", "total"]) -> int:
    try:
        return int(getattr(pynvml.nvmlDeviceGetMemoryInfo(device), which))
    except pynvml.NVMLError as error:
        _tell_once(str(error))
        return 0


@cache
def _tell_once(error: str) -> None:
    """This is read whenever anything changes: the first time is news, the others are noise."""
    log.error("NVML fails, what it cannot see counts as taken", error=error)


def _groups() -> Iterator[Path]:
    """The control groups of this process, those above them included: a service's limit is its own, a container's the
    root's, and each of them binds. A path that belongs to the host is not there, and is skipped when it is read."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        group = _CGROUP / "memory" if controllers else _CGROUP
        yield group
        for part in Path(path).parts[1:]:
            group /= part
            yield group


def _left_in(group: Path) -> Iterator[int]:
    for limit_file, used_file, cache_name in _GROUP_FILES:
        limit, used = _read(group / limit_file), _read(group / used_file)
        if limit is not None and used is not None:
            yield limit - used + _read_stat(group / "memory.stat", cache_name)


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + " "))


def _read(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
