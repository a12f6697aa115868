"""A plan as llama.cpp takes it: how many layers to offload, and patterns for the tensors that go elsewhere.

Without a pattern a tensor of an offloaded layer is on the GPU and every other one in RAM, or mapped where the file is
mapped. llama.cpp tries every pattern on every tensor, so there are few, each for many.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from engines.plan import TIED, TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engines.plan import Plan, Tier, Weight

_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")


def is_mapped(plan: Plan) -> bool:
    """Whether the file is to be mapped: only where something stays on the disk."""
    return "disk" in plan.tiers.values()


def overrides(plan: Plan) -> list[tuple[str, Tier]]:
    """Patterns of the whole names of the tensors that llama.cpp would put elsewhere, with where they go."""
    found: list[tuple[str, Tier]] = []
    for tier in TIERS:
        names = [
            weight.name
            for weight in plan.model.weights
            if plan.tiers[weight.name] == tier and _by_itself(plan, weight) != tier
        ]
        found.extend((pattern, tier) for pattern in patterns(names))
    return found


def _by_itself(plan: Plan, weight: Weight) -> Tier:
    if plan.model.tied and weight.name == TIED and plan.gpu_layers:
        return plan.tiers[weight.name]  # a pattern would move the GPU's copy too
    place = plan.model.layers if weight.layer is None else weight.layer
    if weight.kind != "embedding" and place > plan.model.layers - plan.gpu_layers:
        return "gpu"
    return "disk" if is_mapped(plan) else "ram"


def patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions that match exactly these names; names that have the same layers share one."""
    layers: dict[str, list[int]] = {}
    others: list[str] = []
    for name in names:
        if match := _OF_LAYER.fullmatch(name):
            layers.setdefault(match[2], []).append(int(match[1]))
        else:
            others.append(name)
    endings: dict[tuple[int, ...], list[str]] = {}
    for ending, numbers in layers.items():
        endings.setdefault(tuple(sorted(numbers)), []).append(ending)
    found = [rf"^blk\.({'|'.join(map(str, numbers))})\.({_any(which)})$" for numbers, which in endings.items()]
    return found + ([f"^({_any(others)})$"] if others else [])


def _any(names: Iterable[str]) -> str:
    return "|".join(name.replace(".", r"\.") for name in names)
