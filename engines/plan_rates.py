"""This machine's bandwidths: measured once by `python -m citadel plan --calibrate`, and kept in the data directory.

RAM's is that of products of a matrix and a vector on the CPU, by the type of the weights, for a machine's cores may be
what bounds it. The disk's is that of a mapped file whose pages are not in RAM. What a load does is measured as a load
does it, and of several passes the fastest counts, as of the products: others may run beside, and a virtual machine's
host may take long to hand out memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from engines import huge_pages
from engines.plan_cost import Rates, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

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
"""Of weights, at least; and twice what the largest cache of the processor has, so that it does not hold them."""
_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_STEPS_OF_LAYER: Final = 20
"""Steps of a graph for a layer: norms, products, rotations, attention, activations, sums."""
_PASSES: Final = 3
_DISK_BYTES: Final = 512 << 20
_TOLD: Final = {
    "disk": "disk, touched page by page",
    "load": "disk, mapped at once",
    "copy": "copied from what was mapped",
    "read": "disk, read",
}
"""How the rates of a file are called."""
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

    It takes about half a minute, a GB of RAM and half of one on the disk of `folder`; `scale` makes both smaller.
    """
    threads, size = len(os.sched_getaffinity(0)), int(scale * max(_PRODUCT_BYTES, 2 * _largest_cache()))
    rates = _of_memory(kinds, size, threads, tell)
    with _written(folder, int(_DISK_BYTES * scale)) as file:
        if not drop(file):
            tell(f"{folder}: not measured, its page cache can't be dropped; {rates.load / 1e9:.1f} GB/s assumed")
            return replace(rates, copy=_size(file) / min(_mapped(file)[1] for _ in range(_PASSES)))
        return replace(rates, **_of_disk(file, threads, tell))


def _of_memory(kinds: Sequence[str], size: int, threads: int, tell: Callable[[str], None]) -> Rates:
    from engines import ggml  # noqa: PLC0415 - loads llama.cpp, which kept bandwidths do not need

    ggml.use_huge_pages()
    types: dict[str, float] = {}
    for kind in kinds:
        types[kind] = ggml.products_per_s(kind, size, threads)
        tell(f"RAM, {kind} weights: {types[kind] / 1e9:.2f} GB/s with {threads} threads")
    rates = Rates(ram=min(types.values()), types=types, layer_s=_STEPS_OF_LAYER * ggml.step_s(threads), measured=True)
    tell(f"a layer's steps: {rates.layer_s * 1e6:.0f} us")
    if ggml.gpu():
        rates = replace(rates, gpu=ggml.products_per_s("f16", 4 * _PRODUCT_BYTES, threads, on_gpu=True))
        tell(f"GPU: {rates.gpu / 1e9:.1f} GB/s")
    else:
        tell("GPU: not measured, llama.cpp has none here")
    return rates


def _of_disk(file: int, threads: int, tell: Callable[[str], None]) -> dict[str, float]:
    """What a file on it is read at, by names of `Rates`."""
    seconds: dict[str, list[float]] = {name: [] for name in _TOLD}
    for _ in range(_PASSES):
        drop(file)
        seconds["disk"].append(_timed(partial(_touched, threads=threads), file))
        drop(file)
        seconds["read"].append(_timed(_read, file))
        drop(file)
        mapped, copied = _mapped(file)
        seconds["load"].append(mapped)
        seconds["copy"].append(copied)
    rates = {name: _size(file) / min(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        tell(f"{_TOLD[name]}: {rate / 1e9:.2f} GB/s")
    return rates


def _largest_cache() -> int:
    """Bytes; 0 where the system does not say."""
    try:
        said = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
    except OSError:
        return 0
    return max((int(size.removesuffix("K")) << 10 for size in said if size.endswith("K")), default=0)


@contextmanager
def _written(folder: Path, size: int) -> Generator[int]:
    """A file of random bytes, for a while; its descriptor."""
    block = np.random.default_rng(0).bytes(1 << 20)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(max(1, size >> 20)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield file.fileno()


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _timed(read: Callable[[int], None], file: int) -> float:
    began = time.perf_counter()
    read(file)
    return time.perf_counter() - began


def _touched(file: int, threads: int) -> None:
    """As a generation reads what is mapped: each thread a part."""
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as pages:
        data = np.frombuffer(pages, np.uint8)
        readers = [threading.Thread(target=part.sum) for part in np.array_split(data, threads)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        del data, readers


def _mapped(file: int) -> tuple[float, float]:
    """Seconds to map a file as llama.cpp does, and to copy all of it from there."""
    began = time.perf_counter()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    with mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ) as pages:
        mapped = time.perf_counter()
        with _memory(len(pages)) as memory:
            memory[:] = pages
            return mapped - began, time.perf_counter() - mapped


def _read(file: int) -> None:
    """As a load reads weights that are not mapped."""
    with _memory(_size(file)) as memory:
        at = 0
        while at < len(memory):
            at += os.preadv(file, [memory[at:]], at)


@contextmanager
def _memory(size: int) -> Generator[memoryview]:
    """Memory as weights get it."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        held = ctypes.c_char.from_buffer(memory)
        huge_pages.prepare(ctypes.addressof(held), size)
        del held
        with memoryview(memory) as view:
            yield view


def drop(descriptor: int) -> bool:
    """Gets a file that is on the disk out of RAM; False where the kernel keeps it."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(descriptor) < _RESIDENT


def resident(descriptor: int) -> float:
    """The share of a file's pages that are in RAM."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        held = ctypes.c_char.from_buffer(pages)
        there = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), there)
        del held
    return 1.0 if failed else sum(page & 1 for page in there.raw) / len(there.raw)
