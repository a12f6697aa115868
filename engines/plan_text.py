"""A plan in words: a bar and a line of the table per tier, the speed, and what would change it most."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from engines.plan import TIERS
from engines.plan_cost import cold_s, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engines.plan import Kind, Plan, Tier, Weight
    from engines.plan_cost import Change, Forecast, Rates

_BAR: Final = 40
_NAMES: Final[dict[Tier, str]] = {"gpu": "GPU", "ram": "RAM", "disk": "disk"}


def show(plan: Plan, forecast: Forecast, rates: Rates, changes: Sequence[Change]) -> str:
    """Several lines, without a heading and without an end of line."""
    lines = [_bar(plan, tier) for tier in TIERS if _is_there(plan, tier)]
    lines += ["", f"{'':5}{'weights':>10}{'cache':>10}{'other':>10}{'per token':>11}  holds"]
    for tier in TIERS:
        if _is_there(plan, tier):
            numbers = [plan.weights[tier], plan.cache[tier], plan.reserved[tier]]
            cells = "".join(f"{_gb(number):>10}" for number in numbers) + f"{_gb(forecast.read[tier]):>11}"
            lines.append(f"{_NAMES[tier]:5}{cells}  {holds(plan, tier)}")
    speed = f"{forecast.tokens_per_s:.3g} tokens/s"
    basis = "from this machine's measured bandwidths" if rates.measured else "from assumed bandwidths; see --calibrate"
    lines += ["", f"Predicted: {speed} for one sequence, {basis}"]
    lines.append(
        f"Cold, with nothing of the file in RAM: a first token {cold_s(plan, rates, 1):.3g} s after a load begins"
    )
    if changes:
        lines.append("What would change it most:")
        lines += [f"  {change.what}: {change.tokens_per_s:.3g} tokens/s" for change in changes]
    else:
        lines.append("Nothing that this planner knows of would make it faster.")
    return "\n".join(lines)


def as_json(plan: Plan, forecast: Forecast, rates: Rates, changes: Sequence[Change]) -> dict[str, Any]:
    """The same as data; bytes, seconds and tokens per second."""
    room = {"gpu": plan.room.gpu, "ram": plan.room.ram, "disk": None}
    return {
        "gpu_layers": plan.gpu_layers,
        "tiers": {
            tier: {
                "room": room[tier],
                "used": plan.used(tier),
                "weights": plan.weights[tier],
                "cache": plan.cache[tier],
                "other": plan.reserved[tier],
                "read_per_token": forecast.read[tier],
                "seconds_per_token": forecast.seconds[tier],
                "holds": holds(plan, tier),
            }
            for tier in TIERS
        },
        "tensors": dict(plan.tiers),
        "tokens_per_s": forecast.tokens_per_s,
        "overhead_seconds_per_token": forecast.overhead_s,
        "cold_seconds": cold_s(plan, rates, 1),
        "rates": to_json(rates),
        "changes": [{"what": change.what, "tokens_per_s": change.tokens_per_s} for change in changes],
    }


def holds(plan: Plan, tier: Tier) -> str:
    """What a tier has: by kind and ranges of layers, a layer that is not there as a whole in parts."""
    own = [weight for weight in plan.model.weights if plan.tiers[weight.name] == tier]
    kinds = {weight.kind for weight in own}
    words = [*_of_layers(plan, own, "core"), *_of_layers(plan, own, "expert")]
    words += ["output"] if "output" in kinds else []
    words += ["embeddings"] if "embedding" in kinds else []
    return "; ".join(words) or "nothing"


def _of_layers(plan: Plan, own: Sequence[Weight], kind: Kind) -> list[str]:
    called = "experts of " if kind == "expert" else "all but experts of " if plan.model.has_experts else ""
    whole = Counter(weight.layer for weight in plan.model.weights if weight.kind == kind)
    here = Counter(weight.layer for weight in own if weight.kind == kind)
    complete = [layer for layer, count in here.items() if layer is not None and count == whole[layer]]
    words = [f"{called}layer{'s' if len(complete) > 1 else ''} {ranges(complete)}"] if complete else []
    parts = sorted((layer or 0, count) for layer, count in here.items() if count < whole[layer])
    return words + [f"{count} of {whole[layer]} tensors of {called}layer {layer}" for layer, count in parts]


def ranges(numbers: Iterable[int]) -> str:
    """0-3, 7"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def _is_there(plan: Plan, tier: Tier) -> bool:
    return plan.used(tier) > 0 or (tier == "gpu" and bool(plan.room.gpu))


def _bar(plan: Plan, tier: Tier) -> str:
    used, room = plan.used(tier), {"gpu": plan.room.gpu, "ram": plan.room.ram, "disk": None}[tier]
    if room is None:
        return f"{_NAMES[tier]:5}{_gb(used)}"
    full = min(_BAR, used * _BAR // room) if room else 0
    return f"{_NAMES[tier]:5}[{'#' * full}{'.' * (_BAR - full)}] {_gb(used)} of {_gb(room)}"


def _gb(size: float) -> str:
    if not size:
        return "-"
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
