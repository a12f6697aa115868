"""How fast a plan generates: bytes read per token and tier over that tier's bandwidth; and what would make it faster.

One sequence generates; several share what is read. RAM's bandwidth is that of matrix products on the CPU, which differs
by the type of the weights; a disk's is that of a mapping which is not in RAM.

A load that maps the file reads all of it, from its beginning to its end, and then copies what is to be in RAM or on the
GPU; any other load reads the file into memory of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from engines.plan import TIED, TIERS, NoPlan, Plan, Tier, Wish, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engines.plan import Model

GB: Final = 10**9


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second by tier; `types` are RAM's by the weights' type, where that was measured.

    `disk` is None where all that is mapped is in RAM as well.
    `load` is that of mapping a file, of which nothing is in RAM, all at once; `read` that of reading it into memory of
    its own; `copy` the same of a file that is in the system's page cache.
    `layer_s` is what a layer takes however small it is: handing its steps out, waiting for all threads.
    """

    gpu: float = 800e9
    ram: float = 30e9
    disk: float | None = 2e9
    load: float = 2e9
    read: float = 1.5e9
    copy: float = 4e9
    types: Mapping[str, float] = field(default_factory=dict[str, float])
    layer_s: float = 50e-6
    measured: bool = False

    def of_ram(self, kind: str) -> float:
        return self.types.get(kind, self.ram)


@dataclass(frozen=True, slots=True)
class Forecast:
    """`read` bytes and `seconds` per token by tier; `overhead_s` beside."""

    read: Mapping[Tier, float]
    seconds: Mapping[Tier, float]
    overhead_s: float

    @property
    def token_s(self) -> float:
        return sum(self.seconds.values()) + self.overhead_s

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s if self.token_s else 0.0


def forecast(plan: Plan, rates: Rates, *, depth: float = 0.0) -> Forecast:
    """`depth` is how full the cache is, from 0.0 to 1.0."""
    read: dict[Tier, float] = {tier: plan.cache[tier] * depth for tier in TIERS}
    seconds: dict[Tier, float] = {
        "gpu": read["gpu"] / rates.gpu,
        "ram": read["ram"] / rates.ram,
        "disk": 0.0,
    }
    for weight in plan.model.weights:
        tier, size = plan.tiers[weight.name], weight.read
        if plan.model.tied and weight.name == TIED:
            tier, size = ("gpu", weight.size) if plan.gpu_layers else (tier, weight.size)
        read[tier] += size
        seconds[tier] += size / _rate(rates, tier, weight.type)
    return Forecast(read, seconds, plan.model.layers * rates.layer_s)


def _rate(rates: Rates, tier: Tier, kind: str) -> float:
    if tier == "gpu":
        return rates.gpu
    return rates.of_ram(kind) if tier == "ram" or rates.disk is None else rates.disk


def cold_s(plan: Plan, rates: Rates, tokens: int) -> float:
    """Seconds from a file of which nothing is in RAM, through the load, to the first token after a prompt of `tokens`.

    What a load leaves on the disk is in RAM after it all the same where there is room for it, and else read again.
    """
    whole, mapped = sum(weight.size for weight in plan.model.weights), plan.weights["disk"]
    stays = plan.room.ram is None or plan.used("ram") + mapped <= plan.room.ram
    then = forecast(plan, cached(rates) if stays else rates)
    load_s = whole / rates.load + (whole - mapped) / rates.copy if mapped else whole / rates.read
    return load_s + tokens * then.token_s


def cached(rates: Rates) -> Rates:
    """Those of a machine that has what is mapped in its page cache."""
    return replace(rates, disk=None)


@dataclass(frozen=True, slots=True)
class Change:
    """What could be changed, and the speed with it."""

    what: str
    tokens_per_s: float


def levers(
    plan: Plan, rates: Rates, wish: Wish, again: Mapping[str, Callable[[], Model]], *, depth: float = 0.0
) -> list[Change]:
    """What would make it faster, most first: memory, and what `again` describes the model anew for.

    Of several amounts of one memory, the least and the one that brings most; what brings less than a hundredth is
    left out.
    """
    room, model = plan.room, plan.model
    families = [[(what, made(), room)] for what, made in again.items()]
    if room.gpu is not None and plan.used("gpu") < _all(model):
        families.append(
            [(f"{more} GB more GPU memory", model, replace(room, gpu=room.gpu + more * GB)) for more in _MORE_GPU]
        )
    if room.ram is not None and plan.weights["disk"]:
        families.append([(f"{more} GB more RAM", model, replace(room, ram=room.ram + more * GB)) for more in _MORE_RAM])
    found: list[Change] = []
    for family in families:
        steps: list[Change] = []
        best = forecast(plan, rates, depth=depth).tokens_per_s
        for what, other, there in family:
            try:
                speed = forecast(place(other, there, wish), rates, depth=depth).tokens_per_s
            except NoPlan:
                continue
            if speed > best * 1.01:
                steps.append(Change(what, speed))
                best = speed
        found += steps if len(steps) < 3 else [steps[0], steps[-1]]
    return sorted(found, key=lambda change: -change.tokens_per_s)


_MORE_GPU: Final = (8, 16, 24, 48, 96)
_MORE_RAM: Final = (16, 32, 64, 128, 256, 512)


def _all(model: Model) -> int:
    return sum(weight.size for weight in model.weights) + sum(model.cache) + model.compute


def from_json(said: Any) -> Rates:
    """What `to_json` made; ValueError for anything else."""
    try:
        rates = Rates(**said)
        numbers = [rates.gpu, rates.ram, rates.disk or 0, rates.load, rates.read, rates.copy, *rates.types.values()]
        sound = all(number > 0 for number in numbers) and rates.layer_s >= 0
    except (TypeError, AttributeError):
        sound, rates = False, Rates()
    if not sound:
        raise ValueError("these are no rates")
    return rates


def to_json(rates: Rates) -> dict[str, Any]:
    return asdict(rates)
