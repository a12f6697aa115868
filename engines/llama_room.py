"""What a load of `llama` or `strata` takes and where its weights go: settings, room and files become a plan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from citadel.engine import Need
from citadel.errors import LlmUnavailable
from engines.llama_files import Weights
from engines.llama_native import gpu_offload
from engines.llama_options import settings_of
from engines.plan import NoPlan, Plan, Room, Wish, place

if TYPE_CHECKING:
    from citadel.engine import EngineSpec
    from engines.llama_options import Settings

_GPU_MARGIN: Final = 1 << 30
"""Of each GPU's free memory: the driver's context, and what computing takes beyond the estimate."""
_RAM_KEPT: Final = 20
"""A plan that may use the disk leaves one part in so many of RAM, 2 GB at most, to the system and its page cache."""
_MOST_KEPT: Final = 2 << 30


def need(spec: EngineSpec, engine: str) -> Need:
    """Where the files can't be placed at all, what they would need at least: whoever asks sees that it is too much."""
    settings = settings_of(spec, engine)
    weights = Weights(spec)
    weights.check_complete(spec)
    offload = gpu_offload()
    fitted = settings.disk or (offload and settings.gpu_layers is None)
    try:
        plan = place(weights.describe(spec, settings), room_of(spec, settings, offload=offload), wish_of(settings))
    except NoPlan as refusal:
        if spec.memory_bytes is not None:
            return Need(ram=spec.memory_bytes)
        on_gpu = refusal.kind == "GPU memory"
        return Need(ram=0 if on_gpu else refusal.needed, gpu=refusal.needed if on_gpu else 0, fitted=fitted)
    gpu = plan.used("gpu") + (_GPU_MARGIN if plan.used("gpu") else 0)
    if spec.memory_bytes is not None:
        return Need(ram=max(0, spec.memory_bytes - gpu), gpu=min(gpu, spec.memory_bytes), fitted=fitted)
    return Need(ram=plan.used("ram"), gpu=gpu, fitted=fitted)


def plan_of(spec: EngineSpec, settings: Settings, weights: Weights) -> Plan:
    """The plan of a load; `LlmUnavailable` where there is none: the system would kill the process in mid-load."""
    room = room_of(spec, settings, offload=gpu_offload())
    try:
        return place(weights.describe(spec, settings), room, wish_of(settings))
    except NoPlan as refusal:
        raise LlmUnavailable(spec.model, f"out of memory: {refusal}") from None


def room_of(spec: EngineSpec, settings: Settings, *, offload: bool) -> Room:
    """What the owner, the machine and the models beside leave. `offload`: this build of llama.cpp can use a GPU."""
    gpu: int | None = None
    ram: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if spec.room is not None:
        gpu, ram = max(0, spec.room.gpu - _GPU_MARGIN), spec.room.ram
        if settings.disk:
            ram -= min(ram // _RAM_KEPT, _MOST_KEPT)
    if not offload:
        gpu = 0
    if settings.gpu_memory is not None:
        gpu = settings.gpu_memory if gpu is None else min(gpu, settings.gpu_memory)
    if settings.ram is not None:
        ram = min(ram, settings.ram)
    if spec.memory_bytes is not None and settings.disk:
        gpu = spec.memory_bytes if gpu is None else min(gpu, spec.memory_bytes)
        ram = min(ram, spec.memory_bytes)
    return Room(gpu, ram, settings.disk)


def wish_of(settings: Settings) -> Wish:
    layers = settings.gpu_layers
    return Wish(None if layers is None else 1 << 16 if layers < 0 else layers, settings.place)
