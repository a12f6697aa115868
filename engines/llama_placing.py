"""A plan handed to llama.cpp, and read back from what it loaded.

The binding leaves llama.cpp's list of overrides out, so it is made here: pairs of a pattern and a buffer type. Where
the file is mapped, llama.cpp maps every tensor of the CPU's own buffer type; what is to be in RAM must be of another
one. ggml has none, so it gets a copy of the CPU's under another name, which llama.cpp allocates and reads into.

That copy, and the table of a loaded model's tensors, go by the layout of one version of the library. With another one
weights that belong in RAM are mapped too, and the placement is not read back; both are said in the log.
"""

from __future__ import annotations

import ctypes
import resource
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from citadel.engine import Placement
from engines import ggml
from engines.llama_log import log
from engines.llama_native import lib
from engines.plan import TIERS, Plan, Tier
from engines.plan_patterns import is_mapped, overrides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engines.gguf_parts import Table
    from engines.llama_native import Model
    from engines.llama_options import Settings

_TENSOR_MAP: Final = "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model"
_ENTRY, _TENSOR_AT, _BUFFER_AT = 40, 32, 8
"""A pair of std::string and pointer; the pointer in it; the buffer's in a tensor."""
_BUFFER_TYPE_BYTES: Final = 64
_UNMAPPED, _MAPPED, _LOCKED = 0, 1, 2
"""llama_load_mode."""


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class Placing:
    """`fields` of llama_model_params that make llama.cpp follow the plan. They hold only as long as this does."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        ggml.use_huge_pages()
        self.plan = plan
        self._may_map = settings.disk
        self.fields: dict[str, Any] = {}
        if settings.disk:
            mapped = is_mapped(plan)
            self.fields["load_mode"] = _MAPPED if mapped else _LOCKED if _may_lock(plan.used("ram")) else _UNMAPPED
            if mapped:
                # Of what is mapped, repacking would make a copy in RAM.
                self.fields["use_extra_bufts"] = False
        if settings.disk or plan.used("gpu"):
            self.fields["n_gpu_layers"] = plan.gpu_layers
        wanted = overrides(plan) if settings.disk or plan.used("gpu") else []
        types = {"gpu": _of_gpu, "ram": _of_ram if is_mapped(plan) else _of_cpu, "disk": _of_cpu}
        pairs = [(pattern.encode(), types[tier]()) for pattern, tier in wanted]
        self._list = (_Override * (len(pairs) + 1))(*(_Override(*pair) for pair in pairs))
        if pairs:
            self.fields["tensor_buft_overrides"] = ctypes.addressof(self._list)

    def found(self, model: Model, table: Table) -> dict[str, Tier] | None:
        """Where each tensor is; None where this version's layout is not known."""
        types = buffer_types(model)
        if types is None:
            return None
        # Whether the file of a model that is all in RAM is mapped is llama.cpp's own choice, and the owner's.
        mapped = _mappings([part.path.resolve() for part in table.parts]) if self._may_map else []
        return {name: _tier(held, mapped) for name, held in types.items()}

    def placement(self, model: Model, table: Table, tokens_per_s: float) -> Placement:
        """What was planned beside what is; differences are logged."""
        sizes = {weight.name: weight.size for weight in self.plan.model.weights}
        planned = _by_tier(self.plan.tiers, sizes)
        found = self.found(model, table)
        if found is None:
            log.warning(
                "the placement is not read back: the layout of llama-cpp-python %s is not known", ggml.version()
            )
            return Placement(planned, None, (), tokens_per_s)
        elsewhere = tuple(name for name, tier in found.items() if self.plan.tiers.get(name, tier) != tier)
        log.info("weights by tier, in bytes: planned %s, found %s", planned, _by_tier(found, sizes))
        if elsewhere:
            log.warning("%d tensors are not where they were planned, such as %s", len(elsewhere), elsewhere[0])
        return Placement(planned, _by_tier(found, sizes), elsewhere, tokens_per_s)


def _by_tier(tiers: Mapping[str, Tier], sizes: Mapping[str, int]) -> dict[str, int]:
    return {tier: sum(sizes.get(name, 0) for name, where in tiers.items() if where == tier) for tier in TIERS}


def _may_lock(size: int) -> bool:
    """Whether the system lets this process keep so much from being swapped."""
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return most == resource.RLIM_INFINITY or most >= size


# Buffer types.


def _of_cpu() -> int:
    return ggml.base().ggml_backend_cpu_buffer_type()


def _of_gpu() -> int:
    return ggml.base().ggml_backend_dev_buffer_type(ggml.gpu())


def _of_ram() -> int:
    return _copy_of_cpus()[0] if ggml.layout_is_known() else _of_cpu()


@cache
def _copy_of_cpus() -> tuple[int, Any]:
    """Its address, and what must live as long as the process does. llama.cpp tells buffer types by their names."""
    name = ctypes.create_string_buffer(b"RAM")
    copy = ctypes.create_string_buffer(_BUFFER_TYPE_BYTES)
    ctypes.memmove(copy, ggml.pointer(_of_cpu()), _BUFFER_TYPE_BYTES)

    def named(_buffer_type: int) -> int:
        return ctypes.addressof(name)

    get_name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(named)
    ctypes.memmove(copy, ctypes.byref(ctypes.cast(get_name, ctypes.c_void_p)), ctypes.sizeof(ctypes.c_void_p))
    return ctypes.addressof(copy), (name, copy, get_name)


# Reading back.


class _Vector(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))


class Held:
    """Where llama.cpp holds a tensor: the name of the buffer's type, whether the CPU can read it, the address."""

    def __init__(self, tensor: int) -> None:
        kind = ggml.pointer(ggml.base().ggml_backend_buffer_get_type(ggml.pointer(_read(tensor + _BUFFER_AT))))
        self.type = ggml.base().ggml_backend_buft_name(kind).decode()
        self.is_host = bool(ggml.base().ggml_backend_buft_is_host(kind))
        self.address = ggml.base().ggml_get_data(ggml.pointer(tensor)) or 0


def buffer_types(model: Model) -> dict[str, Held] | None:
    """How llama.cpp holds each tensor, by name; None where this version's layout is not known."""
    if not ggml.layout_is_known():
        return None
    table = lib._lib[_TENSOR_MAP]  # noqa: SLF001 - no function of the binding's gives it
    table.restype = ctypes.POINTER(_Vector)
    vector = table(ctypes.cast(model.handle, ctypes.c_void_p)).contents
    found: dict[str, Held] = {}
    for entry in range(vector.begin or 0, vector.end or 0, _ENTRY):
        name = ctypes.string_at(_read(entry), _read(entry + 8)).decode("utf-8", "replace")
        held = Held(_read(entry + _TENSOR_AT))
        # A copy that the GPU has of the embeddings comes under their name too; they come first.
        found.setdefault(name, held)
    return found


def _read(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _tier(held: Held, mapped: list[range]) -> Tier:
    if not held.is_host:
        return "gpu"
    return "disk" if any(held.address in each for each in mapped) else "ram"


def _mappings(files: list[Path]) -> list[range]:
    """The addresses at which this process has these files mapped."""
    names, found = {str(file) for file in files}, list[range]()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names:
            first, last = (int(address, 16) for address in fields[0].split("-"))
            found.append(range(first, last))
    return found
