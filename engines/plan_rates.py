"""This machine's bandwidths: measured once by `python -m citadel plan --calibrate`, and kept in the data directory.

RAM's is that of products of a matrix and a vector on the CPU, by the type of the weights, for a machine's cores may be
what bounds it. The disk's is that of a mapped file whose pages are not in RAM.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.plan_cost import Rates, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FILE: Final = "bandwidths.json"
_TYPES: Final = (
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q4_K",
    "q5_K",
    "q6_K",
    "q3_K",
    "mxfp4",
    "iq4_xs",
)
_PRODUCT_BYTES: Final = 256 << 20
"""Of weights, so that no cache of a processor holds them."""
_STEPS_OF_LAYER: Final = 20
"""Steps of a graph for a layer: norms, products, rotations, attention, activations, sums."""
_PASSES: Final = 3
_DISK_BYTES: Final = 512 << 20
_RESIDENT: Final = 0.05
"""If more than this share of a file's pages stay in RAM when the kernel is asked to drop them, it does not drop any."""


def load(data_dir: Path | None) -> Rates:
    """What was measured on this machine; else what is assumed of any."""
    if data_dir is None:
        return Rates()
    try:
        said = json.loads((data_dir / _FILE).read_text(encoding="utf-8"))
        return from_json(said["rates"]) if said["machine"] == machine() else Rates()
    except (OSError, ValueError, KeyError, TypeError):
        return Rates()


def keep(data_dir: Path, rates: Rates) -> Path:
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data_dir / _FILE
    path.write_text(json.dumps({"machine": machine(), "rates": to_json(rates)}, indent=2) + "\n", encoding="utf-8")
    return path


def machine() -> str:
    """What a measurement holds for: another processor, or fewer cores of it, has others."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"{model}, {len(os.sched_getaffinity(0))} cores"
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def measure(folder: Path, tell: Callable[[str], None], *, kinds: Sequence[str] = _TYPES, scale: float = 1.0) -> Rates:
    """RAM's by products with weights of these types.

    It takes about half a minute, 256 MB of RAM and 512 MB on the disk of `folder`; `scale` makes both smaller.
    """
    from engines import ggml  # noqa: PLC0415 - loads llama.cpp, which kept bandwidths do not need

    threads = len(os.sched_getaffinity(0))
    types: dict[str, float] = {}
    for kind in kinds:
        types[kind] = ggml.products_per_s(kind, int(_PRODUCT_BYTES * scale), threads)
        tell(f"RAM, {kind} weights: {types[kind] / 1e9:.2f} GB/s with {threads} threads")
    rates = Rates(ram=min(types.values()), types=types, layer_s=_STEPS_OF_LAYER * ggml.step_s(threads), measured=True)
    tell(f"a layer's steps: {rates.layer_s * 1e6:.0f} us")
    if ggml.gpu():
        rates = replace(rates, gpu=ggml.products_per_s("f16", _PRODUCT_BYTES, threads, on_gpu=True))
        tell(f"GPU: {rates.gpu / 1e9:.1f} GB/s")
    else:
        tell("GPU: not measured, llama.cpp has none here")
    disk = disk_per_s(folder, int(_DISK_BYTES * scale), threads)
    if disk is None:
        tell(f"disk: not measured, the page cache of {folder} can't be dropped; {rates.disk / 1e9:.1f} GB/s assumed")
        return rates
    tell(f"disk of {folder}: {disk / 1e9:.2f} GB/s, mapped")
    return replace(rates, disk=disk)


def disk_per_s(folder: Path, size: int, threads: int) -> float | None:
    """Bytes per second of a mapped file that is not in RAM; None where it can't be got out of there."""
    block = np.random.default_rng(0).bytes(1 << 20)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        times: list[float] = []
        for _ in range(_PASSES):
            if not drop(file.fileno()):
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                data = np.frombuffer(pages, np.uint8)
                began = time.perf_counter()
                _touch(np.array_split(data, threads))
                times.append(time.perf_counter() - began)
                del data
    return size / min(times)


def drop(descriptor: int) -> bool:
    """Gets a file that is on the disk out of RAM; False where the kernel keeps it."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(descriptor) < _RESIDENT


def resident(descriptor: int) -> float:
    """The share of a file's pages that are in RAM."""
    import ctypes  # noqa: PLC0415 - of libc one function, here alone

    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        held = ctypes.c_char.from_buffer(pages)
        there = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), there)
        del held
    return 1.0 if failed else sum(page & 1 for page in there.raw) / len(there.raw)


def _touch(parts: list[Any]) -> None:
    """Reads each part in a thread of its own, as llama.cpp's threads do."""
    readers = [threading.Thread(target=part.sum) for part in parts]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
