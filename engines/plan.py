"""Where each tensor of a model lives: a plain decision over plain data, the same for the same numbers.

A model is placed over three tiers: the GPU's memory, RAM, and the disk, from which it is mapped. The rules:
 1. The caches of the layers and what computing takes come first: they can't be anywhere else.
 2. The GPU is filled along one fixed order: the output matrix, then of each layer, from the last one on (llama.cpp
    offloads the last ones), what every token reads: attention, norms, router, shared experts, and its part of the
    cache. Only when all layers have that, their routed experts follow. A model without experts goes by whole layers.
 3. The first layer that does not fit whole is taken in parts, if it has a part that fits.
 4. RAM takes what is left in the same order, experts after all else, and the table of embeddings last: a token reads
    one row of it. What is then left is mapped from the disk, where that is allowed.
 5. What the owner fixed (`Wish`) is placed first and counts first.

Each tier takes a beginning of its order, never a choice out of it: so more memory never takes anything away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Tier = Literal["gpu", "ram", "disk"]
TIERS: Final[tuple[Tier, ...]] = ("gpu", "ram", "disk")
Kind = Literal["core", "expert", "output", "embedding"]
"""`core` is what every token reads of a layer."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor. `read` bytes of it are read for a token. `feeds_forward`: a matrix of a layer without experts."""

    name: str
    size: int
    type: str
    kind: Kind
    layer: int | None
    read: float
    feeds_forward: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be placed, in bytes.

    `cache` is each layer's; `tied`: the output matrix is the table of embeddings, and a copy of it on the GPU.
    `compute` is taken on the GPU, where it is used, and in RAM; `base` is what a load takes of RAM beside.
    """

    weights: tuple[Weight, ...]
    cache: tuple[int, ...]
    compute: int
    base: int
    tied: bool = False

    @property
    def layers(self) -> int:
        return len(self.cache)

    @property
    def has_experts(self) -> bool:
        return any(weight.kind == "expert" for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may be taken; None is without end. `disk`: weights may stay there."""

    gpu: int | None
    ram: int | None
    disk: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """What the owner fixed: the number of layers on the GPU (the output is one), tensors' tiers by pattern."""

    gpu_layers: int | None = None
    place: tuple[tuple[re.Pattern[str], Tier], ...] = ()

    def tier(self, name: str) -> Tier | None:
        return next((tier for pattern, tier in self.place if pattern.search(name)), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """`tiers` by tensor. `gpu_layers` counts as llama.cpp does; `reserved` is cache and compute, in bytes by tier."""

    model: Model
    room: Room
    tiers: Mapping[str, Tier]
    gpu_layers: int
    cache: Mapping[Tier, int]
    reserved: Mapping[Tier, int]
    weights: Mapping[Tier, int]

    def used(self, tier: Tier) -> int:
        return self.weights[tier] + self.cache[tier] + self.reserved[tier]


@dataclass(frozen=True, slots=True)
class NoPlan(Exception):
    """It can't be placed: at least `needed` bytes of the memory called `kind`, and there are `free`."""

    kind: str
    needed: int
    free: int

    def __str__(self) -> str:
        return f"it needs {self.needed / 1e9:.2f} GB of {self.kind}, there are {self.free / 1e9:.2f} GB"


@dataclass(frozen=True, slots=True)
class _Item:
    """What is taken together: weights, a layer's cache, and a copy that the GPU needs of what is elsewhere too."""

    weights: tuple[Weight, ...] = ()
    cache: int = 0
    copy: int = 0
    layer: bool = False
    """It makes the layer (or the output) one of the GPU's."""

    @property
    def size(self) -> int:
        return sum(weight.size for weight in self.weights) + self.cache + self.copy


@dataclass(slots=True)
class _Taken:
    """What a tier has taken so far."""

    room: int | None
    weights: dict[str, Weight] = field(default_factory=dict[str, Weight])
    used: int = 0
    cache: int = 0
    copies: int = 0
    layers: int = 0

    def fits(self, size: int) -> bool:
        return self.room is None or self.used + size <= self.room

    def take(self, item: _Item) -> bool:
        if not self.fits(item.size):
            return False
        self.weights |= {weight.name: weight for weight in item.weights}
        self.used += item.size
        self.cache += item.cache
        self.copies += item.copy
        self.layers += item.layer
        return True


def place(model: Model, room: Room, wish: Wish | None = None) -> Plan:
    """The plan, or `NoPlan`."""
    wish = wish or Wish()
    fixed: dict[str, Tier] = {}
    for weight in model.weights:
        if tier := wish.tier(weight.name):
            fixed[weight.name] = tier
    gpu = _fill_gpu(model, room, wish, fixed)
    cache = sum(model.cache) - gpu.cache
    ram = _Taken(room.ram, used=model.base + model.compute + cache)
    if not ram.fits(0):
        raise NoPlan("RAM", ram.used, room.ram or 0)
    left = [weight for weight in _in_order(model) if weight.name not in gpu.weights]
    must = [weight for weight in left if fixed.get(weight.name) == "ram" or not room.disk]
    if not ram.take(_Item(tuple(must))):
        raise NoPlan("RAM", ram.used + sum(weight.size for weight in must), room.ram or 0)
    for weight in left:
        if weight.name in ram.weights or fixed.get(weight.name) == "disk":
            continue
        if not ram.take(_Item((weight,))):
            break
    tiers: dict[str, Tier] = {
        weight.name: "gpu" if weight.name in gpu.weights else "ram" if weight.name in ram.weights else "disk"
        for weight in model.weights
    }
    sizes: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for weight in model.weights:
        sizes[tiers[weight.name]] += weight.size
    sizes["gpu"] += gpu.copies
    uses_gpu = model.compute if gpu.used else 0
    return Plan(
        model,
        room,
        tiers,
        gpu.layers,
        cache={"gpu": gpu.cache, "ram": cache, "disk": 0},
        reserved={"gpu": uses_gpu, "ram": model.base + model.compute, "disk": 0},
        weights=sizes,
    )


def _fill_gpu(model: Model, room: Room, wish: Wish, fixed: Mapping[str, Tier]) -> _Taken:
    """What goes to the GPU; nothing where not even the first of the order fits."""
    gpu = _Taken(room.gpu, used=model.compute)
    nothing = _Taken(0)
    forced = tuple(weight for weight in model.weights if fixed.get(weight.name) == "gpu")
    if forced and not gpu.take(_Item(forced)):
        raise NoPlan("GPU memory", gpu.used + sum(weight.size for weight in forced), room.gpu or 0)
    free = [weight for weight in model.weights if weight.name not in fixed]
    if wish.gpu_layers is not None:
        wanted = list(_items(model, free, whole=True))[: wish.gpu_layers]
        for item in wanted:
            if not gpu.take(item):
                raise NoPlan("GPU memory", model.compute + sum(each.size for each in wanted), room.gpu or 0)
        return gpu if gpu.weights else nothing
    for item in _items(model, free, whole=not model.has_experts):
        if not gpu.take(item):
            for part in _parts(item):
                if not gpu.take(part):
                    break
            break
    return gpu if gpu.weights else nothing


def _items(model: Model, weights: Sequence[Weight], *, whole: bool) -> Iterator[_Item]:
    """The GPU's order. `whole` layers, or first what every token reads of all of them, and then their experts."""
    tied = next((weight.size for weight in model.weights if model.tied and weight.name == TIED), 0)
    yield _Item(tuple(weight for weight in weights if weight.kind == "output"), copy=tied, layer=True)
    backwards = range(model.layers - 1, -1, -1)
    for layer in backwards:
        own = [weight for weight in weights if weight.layer == layer]
        taken = own if whole else [weight for weight in own if weight.kind != "expert"]
        yield _Item(tuple(taken), cache=model.cache[layer], layer=True)
    if whole:
        return
    for layer in backwards:
        experts = tuple(weight for weight in weights if weight.layer == layer and weight.kind == "expert")
        if experts:
            yield _Item(experts)


def _parts(item: _Item) -> Iterator[_Item]:
    """A layer that does not fit: first what its cache belongs to, then its matrices one by one. An output is one."""
    if not item.layer:
        yield from (_Item((weight,)) for weight in item.weights)
        return
    attention = tuple(weight for weight in item.weights if not weight.feeds_forward)
    forward = [weight for weight in item.weights if weight.feeds_forward]
    if not forward or any(weight.kind == "output" for weight in item.weights):
        return
    yield _Item(attention, cache=item.cache, layer=True)
    yield from (_Item((weight,)) for weight in forward)


TIED: Final = "token_embd.weight"
_RANK: Final[Mapping[Kind, int]] = {"core": 0, "output": 0, "expert": 1, "embedding": 2}


def _in_order(model: Model) -> list[Weight]:
    """RAM's order: as the GPU's, the embeddings last; but all of a token's reads where they are the output too."""
    top = model.layers

    def key(weight: Weight) -> tuple[int, int]:
        rank = 0 if model.tied and weight.name == TIED else _RANK[weight.kind]
        return rank, -(top if weight.layer is None else weight.layer)

    return sorted(model.weights, key=key)
