"""The planner: what holds for every model and every amount of memory, and the plans of published models to read."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from gguf_headers import Told, header
from hypothesis import given, settings
from hypothesis import strategies as st
from published import PUBLISHED, write

from engines.gguf_header import NotGguf
from engines.gguf_parts import read_table
from engines.plan import TIERS, Kind, Model, NoPlan, Plan, Room, Weight, Wish, place
from engines.plan_cost import GB, Rates, cached, cold_s, forecast, from_json, levers, to_json
from engines.plan_model import Workload, describe
from engines.plan_text import as_json, ranges, show

RATES = Rates(gpu=800e9, ram=40e9, disk=4e9, load=5e9, read=4e9, copy=8e9)


# What holds for every model.


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers, sizes = draw(st.integers(1, 5)), st.integers(1, 9)
    weights: list[Weight] = []

    def add(name: str, kind: Kind, layer: int | None = None, share: float = 1.0, forward: bool = False) -> None:
        size = draw(sizes)
        weights.append(Weight(name, size, "f32", kind, layer, size * share, forward))

    add("token_embd.weight", "embedding", share=0.1)
    for layer in range(layers):
        add(f"blk.{layer}.attn", "core", layer)
        if draw(st.booleans()):
            add(f"blk.{layer}.up", "core", layer, forward=True)
            add(f"blk.{layer}.down", "core", layer, forward=True)
        else:
            add(f"blk.{layer}.up_exps", "expert", layer, 0.25)
            add(f"blk.{layer}.down_exps", "expert", layer, 0.25)
    tied = draw(st.booleans())
    if not tied:
        add("output.weight", "output")
    caches = tuple(draw(st.lists(st.integers(0, 4), min_size=layers, max_size=layers)))
    return Model(tuple(weights), caches, draw(st.integers(0, 3)), draw(st.integers(0, 3)), tied)


AMOUNTS = st.integers(0, 120)
ROOMS = st.builds(Room, gpu=AMOUNTS, ram=AMOUNTS, disk=st.booleans())
EVEN = Rates(gpu=8, ram=2, disk=1, layer_s=0)


def planned(model: Model, room: Room) -> Plan | None:
    try:
        return place(model, room)
    except NoPlan as refusal:
        assert refusal.needed > refusal.free  # noqa: PT017 - not each model and room ends here
        return None


@given(models(), ROOMS)
@settings(deadline=None, max_examples=300)
def test_a_plan_is_never_over_a_tier_and_places_every_tensor_once(model: Model, room: Room):
    plan = planned(model, room)
    if plan is None:
        return
    assert plan.tiers.keys() == {weight.name for weight in model.weights}
    assert room.gpu is not None
    assert room.ram is not None
    assert plan.used("gpu") <= room.gpu
    assert plan.used("ram") <= room.ram
    assert room.disk or plan.weights["disk"] == 0
    copied = model.tied and plan.gpu_layers > 0
    copy = next(weight.size for weight in model.weights if weight.kind == "embedding") if copied else 0
    assert sum(plan.weights.values()) == sum(weight.size for weight in model.weights) + copy
    assert sum(plan.cache.values()) == sum(model.cache)


@given(models(), ROOMS, AMOUNTS, AMOUNTS)
@settings(deadline=None, max_examples=300)
def test_more_memory_never_makes_a_plan_worse(model: Model, room: Room, gpu: int, ram: int):
    assert room.gpu is not None
    assert room.ram is not None
    small, large = planned(model, room), planned(model, replace(room, gpu=room.gpu + gpu, ram=room.ram + ram))
    if small is None:
        return
    assert large is not None
    better = {"gpu": 0, "ram": 1, "disk": 2}
    for name, tier in small.tiers.items():
        assert better[large.tiers[name]] <= better[tier]
    assert forecast(large, EVEN, depth=1).token_s <= forecast(small, EVEN, depth=1).token_s + 1e-9


@given(models(), ROOMS)
@settings(deadline=None)
def test_the_same_numbers_give_the_same_plan(model: Model, room: Room):
    assert planned(model, room) == planned(model, room)


@given(models(), ROOMS)
@settings(deadline=None)
def test_experts_come_after_what_every_token_reads_and_layers_are_the_last_ones(model: Model, room: Room):
    plan = planned(model, room)
    if plan is None:
        return
    experts = {tier: [w for w in model.weights if w.kind == "expert" and plan.tiers[w.name] == tier] for tier in TIERS}
    cores = {tier: [w for w in model.weights if w.kind == "core" and plan.tiers[w.name] == tier] for tier in TIERS}
    if model.has_experts and experts["gpu"]:
        assert not cores["ram"]
        assert not cores["disk"]
    if experts["ram"]:
        assert not cores["disk"]
    on_gpu = {weight.layer for weight in cores["gpu"]}
    assert on_gpu == {layer for layer in range(model.layers) if layer > model.layers - 1 - len(on_gpu)}


# The plans of published models.


@cache
def published(folder: Path, name: str, cells: int = 32_768) -> Model:
    return describe(read_table(write(folder, name)), Workload(cells))


def golden(folder: Path, name: str, gpu: int, ram: int) -> str:
    model = published(folder, name)
    plan = place(model, Room(gpu * GB, ram * GB, disk=True))
    half = {"half the context": lambda: published(folder, name, 16_384)}
    found = show(plan, forecast(plan, RATES), RATES, levers(plan, RATES, Wish(), half))
    return "\n".join(line.rstrip() for line in found.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


GOLDEN = Path(__file__).parent / "plans"
BOXES = {
    "deepseek-v3-671b": (24, 256),
    "qwen3-235b-a22b": (24, 64),
    "gpt-oss-120b": (24, 64),
    "dense-70b": (24, 64),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_of_a_published_model_reads_as_it_did(folder: Path, name: str):
    assert golden(folder, name, *BOXES[name]) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
@given(gpu=st.integers(0, 120), ram=st.integers(1, 600))
@settings(deadline=None, max_examples=25)
def test_published_models_stay_within_every_box(folder: Path, name: str, gpu: int, ram: int):
    plan = planned(published(folder, name), Room(gpu * GB, ram * GB, disk=True))
    if plan is not None:
        assert plan.used("gpu") <= gpu * GB
        assert plan.used("ram") <= ram * GB
        assert len(plan.tiers) == len(published(folder, name).weights)


@pytest.mark.parametrize(
    ("name", "size", "parameters", "active"),
    [
        ("deepseek-v3-671b", 404.43, 671, 37),
        ("qwen3-235b-a22b", 142.65, 235, 22),
        ("gpt-oss-120b", 63.39, 117, 5.1),
        ("dense-70b", 42.52, 70.6, 70.6),
    ],
)
def test_a_published_model_is_as_large_as_it_is_said_to_be(
    folder: Path, name: str, size: float, parameters: float, active: float
):
    """In GB and in billions: what people download, and what a token uses (the row of the embeddings aside)."""
    table, model = read_table(write(folder, name)), published(folder, name)
    assert table.size / GB == pytest.approx(size, rel=0.005)
    counts = [math.prod(tensor.shape) for tensor in table.tensors]
    assert sum(counts) / 1e9 == pytest.approx(parameters, rel=0.005)
    used = sum(count * weight.read / weight.size for count, weight in zip(counts, model.weights, strict=True))
    assert used / 1e9 == pytest.approx(active, rel=0.02)


def test_a_cache_is_what_the_kinds_of_layers_keep(folder: Path):
    """Heads of keys and values; of latent attention the latent and its rotated part; of a recurrent layer no tokens."""
    cells = 32_768
    assert sum(published(folder, "dense-70b").cache) == 80 * cells * 8 * 128 * 2 * 2
    assert sum(published(folder, "deepseek-v3-671b").cache) == 61 * cells * (512 + 64) * 2
    hybrid = {f"ssm.{key}": number for key, number in zip(SSM, (4, 4096, 16, 128), strict=True)}
    metadata = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, **hybrid}
    (folder / "hybrid.gguf").write_bytes(
        header(
            {"general.architecture": "h", **{f"h.{key}": number for key, number in metadata.items()}},
            [
                *(Told(f"blk.{layer}.ssm_conv1d.weight", (4, 8)) for layer in range(3)),
                *(Told(f"blk.{layer}.attn_k.weight", (64, 64)) for layer in (2, 3)),
            ],
        )
    )
    state, tokens = 4 * 2 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096), 1000 * 2 * 64 * 2
    model = describe(read_table(folder / "hybrid.gguf"), Workload(1000, sequences=2))
    assert model.cache == (state, state, state + tokens, tokens)


SSM = ("conv_kernel", "inner_size", "group_count", "state_size")


def test_a_shared_expert_and_a_router_are_no_experts(folder: Path):
    model = published(folder, "deepseek-v3-671b")
    kinds = {weight.name: weight.kind for weight in model.weights}
    assert kinds["blk.5.ffn_gate_exps.weight"] == "expert"
    assert {kinds[f"blk.5.{name}"] for name in ("ffn_gate_shexp.weight", "ffn_gate_inp.weight")} == {"core"}
    read = {weight.name: weight.read / weight.size for weight in model.weights}
    assert read["blk.5.ffn_gate_exps.weight"] == 8 / 256
    assert read["token_embd.weight"] == 1 / 129_280


# What the owner fixes, and what can't be.


def test_an_owners_patterns_and_layers_come_first(folder: Path):
    model, room = published(folder, "gpt-oss-120b"), Room(24 * GB, 64 * GB, disk=True)
    wish = Wish(place=((re.compile(r"blk\.[01]\.ffn_.*exps"), "gpu"), (re.compile(r"blk\.35\."), "disk")))
    plan = place(model, room, wish)
    assert plan.tiers["blk.0.ffn_up_exps.weight"] == "gpu"
    assert {plan.tiers[w.name] for w in model.weights if w.layer == 35} == {"disk"}
    assert place(model, room, Wish(gpu_layers=3)).gpu_layers == 3
    with pytest.raises(NoPlan, match="GPU memory"):
        place(model, room, Wish(gpu_layers=37))


def test_without_a_disk_all_must_fit(folder: Path):
    model = published(folder, "dense-70b")
    with pytest.raises(NoPlan, match=r"it needs 53\.\d\d GB of RAM, there are 40\.00 GB"):
        place(model, Room(0, 40 * GB, disk=False))
    assert place(model, Room(0, 40 * GB, disk=True)).weights["disk"] > 0
    with pytest.raises(NoPlan, match=r"it needs 11\.\d\d GB of RAM"):
        place(model, Room(0, 8 * GB, disk=True))


def test_without_bounds_everything_is_on_the_gpu(folder: Path):
    plan = place(published(folder, "qwen3-235b-a22b"), Room(None, None, disk=True))
    assert plan.gpu_layers == 95
    assert [name for name, tier in plan.tiers.items() if tier != "gpu"] == ["token_embd.weight"]


def test_a_tensor_of_a_layer_that_there_is_not_is_refused(folder: Path):
    path = write(folder, "dense-70b")
    content = path.read_bytes().replace(b"blk.79.attn_q.weight", b"blk.99.attn_q.weight")
    (folder / "odd.gguf").write_bytes(content)
    with pytest.raises(NotGguf, match="of a layer that there is not"):
        describe(read_table(folder / "odd.gguf"), Workload(1024))


# The cost.


def test_a_cold_start_reads_the_file_and_copies_what_is_not_mapped(folder: Path):
    model = published(folder, "gpt-oss-120b")
    size = sum(weight.size for weight in model.weights)
    small, large = (place(model, Room(0, ram * GB, disk=True)) for ram in (40, 80))
    on_disk = sum(weight.read for weight in model.weights if small.tiers[weight.name] == "disk")
    assert forecast(small, RATES).seconds["disk"] == pytest.approx(on_disk / RATES.disk)
    assert cold_s(large, RATES, 1) == pytest.approx(size / 4e9 + forecast(large, RATES).token_s)
    assert cold_s(small, RATES, 3) == pytest.approx(
        size / 5e9 + (size - small.weights["disk"]) / 8e9 + 3 * forecast(small, RATES).token_s
    )
    room_for_both = replace(small, room=Room(0, 80 * GB, disk=True))
    assert cold_s(room_for_both, RATES, 1) == pytest.approx(
        size / 5e9 + (size - small.weights["disk"]) / 8e9 + forecast(small, cached(RATES)).token_s
    )
    assert forecast(small, cached(RATES)).token_s == pytest.approx(forecast(large, RATES).token_s)


def test_rates_of_a_type_and_a_layers_overhead_count():
    weights = (Weight("blk.0.attn", 80, "q4_K", "core", 0, 80.0), Weight("output", 40, "f32", "output", None, 40.0))
    plan = place(Model(weights, (0,), 0, 0), Room(0, None, disk=False))
    rates = Rates(ram=10, types={"q4_K": 5}, layer_s=3)
    assert forecast(plan, rates).token_s == 80 / 5 + 40 / 10 + 3


def test_rates_survive_json_and_nonsense_is_no_rates():
    rates = Rates(types={"q4_K": 5e9}, measured=True)
    assert from_json(to_json(rates)) == rates
    for said in (None, [], {"speed": 1}, {**to_json(rates), "ram": 0}, {**to_json(rates), "gpu": "fast"}):
        with pytest.raises(ValueError, match="no rates"):
            from_json(said)


def test_a_plan_as_data_says_the_same(folder: Path):
    model = published(folder, "dense-70b")
    plan = place(model, Room(24 * GB, 64 * GB, disk=True))
    said = as_json(plan, forecast(plan, RATES), RATES, [])
    assert said["tiers"]["gpu"]["used"] == plan.used("gpu")
    assert said["tensors"]["output.weight"] == "gpu"
    assert said["tokens_per_s"] == forecast(plan, RATES).tokens_per_s
    assert said["rates"] == to_json(RATES)


def test_layers_are_named_in_ranges():
    assert ranges([3, 0, 1, 2, 7, 9, 8]) == "0-3, 7-9"
