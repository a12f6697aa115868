"""ggml's own functions, below llama.cpp: devices, buffer types, and a product of matrices to measure memory by.

They are found through llama.cpp's library: the binding's folder has each of ggml's under several names, and a file
loaded under another one would be a second ggml, whose buffer types llama.cpp does not know.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from engines import huge_pages
from engines.gguf_header import BLOCKS
from engines.llama_log import VERSION
from engines.llama_native import let_threads_go, lib

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_CPU, _GPU = 0, 1
"""ggml_backend_dev_type."""
_NUMBERS: Final = {name: number for number, (name, _, _) in BLOCKS.items()}
_WIDTH: Final = 4096
_LEAST_ROUNDS, _MEASURED_S = 4, 1.0
_PARTS: Final = 64
"""Of what is measured: each about as large as a matrix of a model."""
_STEPS: Final = 100
"""Of a graph of norms, to measure what a step takes that is no product."""

_POINTERS: Final = (
    "ggml_init ggml_new_tensor_2d ggml_mul_mat ggml_mul ggml_rms_norm ggml_new_graph_custom ggml_get_data "
    "ggml_backend_alloc_ctx_tensors ggml_backend_dev_by_type ggml_backend_dev_buffer_type ggml_backend_dev_init "
    "ggml_backend_cpu_buffer_type ggml_backend_buffer_get_type ggml_backend_buffer_get_base"
)
_KNOWN: Final = ("0.3.36 (0.5.0-dev)",)
"""Versions of the binding, and of its library, whose structures have the layout that is written down here and used by
llama_placing.py."""
_ALLOCATE_AT: Final = 8
"""The function that allocates, in a buffer type."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def base() -> Any:
    """ggml's functions. Those named in `_POINTERS` return pointers, which ctypes would cut to 32 bits."""
    library = ctypes.CDLL(lib._lib._name)  # noqa: SLF001 - where the binding found its library
    for name in _POINTERS.split():
        getattr(library, name).restype = ctypes.c_void_p
    library.ggml_backend_buft_name.restype = ctypes.c_char_p
    return library


def version() -> str:
    return f"{VERSION} ({lib.llama_version().decode()})"


def layout_is_known() -> bool:
    return version() in _KNOWN


@cache
def use_huge_pages() -> Any:
    """From now on ggml's memory of the CPU is in huge pages, where that is worth it. What it returns is kept.

    ggml has no setting for that, so the function of its buffer type that allocates is replaced.
    """
    if not layout_is_known():
        return None
    place = ctypes.c_void_p.from_address(base().ggml_backend_cpu_buffer_type() + _ALLOCATE_AT)
    of_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    allocate = of_type(place.value or 0)

    def prepared(buffer_type: int, size: int) -> int | None:
        buffer = allocate(buffer_type, size)
        if buffer:
            huge_pages.prepare(base().ggml_backend_buffer_get_base(pointer(buffer)), size)
        return buffer

    replaced = of_type(prepared)
    place.value = ctypes.cast(replaced, ctypes.c_void_p).value
    return replaced


def pointer(address: Any) -> ctypes.c_void_p:
    """ctypes passes a bare integer as 32 bits."""
    return ctypes.c_void_p(address)


def gpu() -> ctypes.c_void_p | None:
    """The first GPU of this build of ggml."""
    device = base().ggml_backend_dev_by_type(_GPU)
    return pointer(device) if device else None


def products_per_s(kind: str, size: int, threads: int, *, on_gpu: bool = False) -> float:
    """Bytes per second at which `size` bytes of weights of a type are multiplied by a vector, as a token does it."""
    rows = max(1, size // (_WIDTH // BLOCKS[_NUMBERS[kind]][1] * BLOCKS[_NUMBERS[kind]][2]))
    parts = 1 if on_gpu else _PARTS  # handing a product to a GPU would take as long as a small one does
    part = -(-rows // parts)
    with _graph(2 * parts + 1, on_gpu=on_gpu, threads=threads) as graph:
        vector = graph.matrix("f32", _WIDTH, 1)
        for _ in range(parts):
            graph.add(base().ggml_mul_mat(graph.context, graph.matrix(kind, _WIDTH, part), vector), steps=1)
        return part * _WIDTH // BLOCKS[_NUMBERS[kind]][1] * BLOCKS[_NUMBERS[kind]][2] / graph.seconds()


def step_s(threads: int) -> float:
    """Seconds that a step of a graph takes that is no product: half of them norms, on one thread, half of all."""
    with _graph(4, on_gpu=False, threads=threads) as graph:
        vector, weights = graph.matrix("f32", _WIDTH, 1), graph.matrix("f32", _WIDTH, 1)
        for _ in range(_STEPS // 2):
            norm = pointer(base().ggml_rms_norm(graph.context, vector, ctypes.c_float(1e-5)))
            vector = pointer(base().ggml_mul(graph.context, norm, weights))
        graph.add(vector, steps=_STEPS)
        return graph.seconds() / _STEPS


def fastest_tenth(times: Sequence[float]) -> float:
    """The time below which a tenth of two or more are; never less than the least of them, however few there are."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


class _Graph:
    def __init__(self, context: ctypes.c_void_p, backend: ctypes.c_void_p) -> None:
        self.context = context
        self._backend = backend
        self._graphs: list[ctypes.c_void_p] = []

    def matrix(self, kind: str, width: int, rows: int) -> ctypes.c_void_p:
        number = ctypes.c_int64
        return pointer(base().ggml_new_tensor_2d(self.context, _NUMBERS[kind], number(width), number(rows)))

    def add(self, tensor: Any, steps: int) -> None:
        """A graph that computes a tensor. They are computed in turn, so that no cache holds what they read."""
        graph = pointer(
            base().ggml_new_graph_custom(self.context, ctypes.c_size_t(2 * steps + 8), ctypes.c_bool(False))
        )
        base().ggml_build_forward_expand(graph, tensor if isinstance(tensor, ctypes.c_void_p) else pointer(tensor))
        self._graphs.append(graph)

    def seconds(self) -> float:
        """Of one of the graphs, in the fastest tenth of the rounds through all of them; after a round to warm up.

        Rounds, as a token is one through a model: memory is not as fast all the time, and the fastest moments of it
        are not what a token gets. The fastest, for others may run beside.
        """
        buffer = base().ggml_backend_alloc_ctx_tensors(self.context, self._backend)
        if not buffer:
            raise MemoryError("there is no memory to measure memory with")
        try:
            # Not zeros: pages that were never written are all one page.
            base().ggml_backend_buffer_clear(pointer(buffer), ctypes.c_uint8(1))
            times: list[float] = []
            while len(times) < _LEAST_ROUNDS or sum(times) < _MEASURED_S:
                began = time.perf_counter()
                for graph in self._graphs:
                    base().ggml_backend_graph_compute(self._backend, graph)
                times.append(time.perf_counter() - began)
            return fastest_tenth(times[1:]) / len(self._graphs)
        finally:
            base().ggml_backend_buffer_free(pointer(buffer))


@contextmanager
def _graph(tensors: int, *, on_gpu: bool, threads: int) -> Generator[_Graph]:
    room = (tensors + 2 * _STEPS) * 1024 + (1 << 20)
    context = pointer(base().ggml_init(_InitParams(room, None, True)))
    device = pointer(base().ggml_backend_dev_by_type(_GPU if on_gpu else _CPU))
    backend = pointer(base().ggml_backend_dev_init(device, None))
    try:
        if not on_gpu:
            base().ggml_backend_cpu_set_n_threads(backend, threads)
        yield _Graph(context, backend)
    finally:
        let_threads_go()  # they would slow down a model that is loaded later
        base().ggml_backend_free(backend)
        base().ggml_free(context)
