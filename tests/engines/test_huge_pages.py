"""Memory for weights: advised, and all of it there; buffers of ggml get it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator
from pathlib import Path

import pytest

from engines import ggml, huge_pages

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
SIZE = huge_pages.LEAST + 3 * mmap.PAGESIZE


def of_mapping(address: int) -> dict[str, str]:
    """What /proc/self/smaps says of the mapping that an address is in."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, said = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(each, 16) for each in name.split("-"))
            inside = first <= address < last
        elif inside:
            found[name[:-1]] = said.strip()
    return found


@pytest.fixture
def memory() -> Generator[int]:
    """The address of memory that nothing has written to."""
    with mmap.mmap(-1, SIZE) as held:
        first = ctypes.c_char.from_buffer(held)
        yield ctypes.addressof(first)
        del first


def test_memory_is_advised_and_there(memory: int):
    huge_pages.prepare(memory, SIZE)
    found = of_mapping(memory)
    assert "hg" in found["VmFlags"].split()
    assert found["Rss"] == f"{SIZE >> 10} kB"


def test_little_memory_is_left_as_it_is(memory: int):
    huge_pages.prepare(memory, huge_pages.LEAST - 1)
    found = of_mapping(memory)
    assert "hg" not in found["VmFlags"].split()
    assert found["Rss"] == "0 kB"


def test_what_cannot_be_advised_is_no_error(monkeypatch: pytest.MonkeyPatch, memory: int):
    monkeypatch.setattr(huge_pages, "_ADVISE_HUGE", -1)
    monkeypatch.setattr(huge_pages, "_POPULATE", -1)
    huge_pages.prepare(memory, SIZE)
    assert of_mapping(memory)["Rss"] == "0 kB"


def test_a_buffer_of_ggml_is_in_huge_pages():
    ggml.use_huge_pages()
    base = ggml.base()
    base.ggml_backend_buft_alloc_buffer.restype = ctypes.c_void_p
    buffer_type = ggml.pointer(base.ggml_backend_cpu_buffer_type())
    buffer = ggml.pointer(base.ggml_backend_buft_alloc_buffer(buffer_type, ctypes.c_size_t(SIZE)))
    try:
        address = base.ggml_backend_buffer_get_base(buffer)
        assert "hg" in of_mapping(address + mmap.PAGESIZE)["VmFlags"].split()
    finally:
        base.ggml_backend_buffer_free(buffer)
