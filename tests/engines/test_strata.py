"""The strata engine on a tiny mixture of experts: plans are followed, change no output, and are read back.

The GPU tier needs a GPU: what is here of it is skipped without one.
"""

from __future__ import annotations

import asyncio
import stat
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from rigs import LLAMA, STRATA, all_of, loaded, tokens_of
from tiny_moe import CONTEXT, EXPERTS, FORWARD, LAYERS, WIDTH, write

from citadel.engine import Engine, EngineSpec, Job, Need, Sampling
from citadel.errors import LlmUnavailable
from engines import adapter, ggml, kept, llama_placing, llama_session
from engines.llama_native import gpu_offload

EXPERT_BYTES = 4 * 3 * EXPERTS * FORWARD * WIDTH
"""Of one layer."""
PROMPT = list(range(5, 60))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adapter("strata")  # imported here, where it holds up no event loop
    return write(tmp_path_factory.mktemp("moe") / "moe.gguf")


@pytest.fixture
def spec(source: Path, tmp_path: Path) -> EngineSpec:
    options = {"n_threads": 1, "n_gpu_layers": 0, "prompt_cache_mb": 1}
    return EngineSpec("moe", source, None, 2, CONTEXT // 2, None, tmp_path / "cache", options, tmp_path / "data")


async def said(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return tokens_of(await all_of(engine, Job("job", prompt, Sampling(24, temperature=0, ignore_eos=True))))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Filled by a load: the type of the buffer that each tensor is in."""
    types: dict[str, str] = {}
    look = llama_placing.buffer_types

    def looked(model: Any) -> dict[str, llama_placing.Held] | None:
        found = look(model)
        types.clear()
        types.update({name: each.type for name, each in (found or {}).items()})
        return found

    monkeypatch.setattr(llama_placing, "buffer_types", looked)
    return types


PLANS = {
    "all in RAM": ({}, 0, {"CPU"}),
    "all experts on the disk": ({"place": {"_exps": "disk"}}, LAYERS * EXPERT_BYTES, {"RAM", "CPU_Mapped"}),
    "two layers' on the disk": ({"place": {r"blk\.[01]\..*_exps": "disk"}}, 2 * EXPERT_BYTES, {"RAM", "CPU_Mapped"}),
    "one matrix on the disk": ({"place": {r"blk\.2\.ffn_up_exps": "disk"}}, EXPERT_BYTES // 3, {"RAM", "CPU_Mapped"}),
    "all on the disk": ({"place": {".": "disk"}}, None, {"CPU_Mapped"}),
}


@pytest.mark.parametrize("name", PLANS)
async def test_a_plan_is_followed_and_changes_no_output(spec: EngineSpec, held: dict[str, str], name: str):
    options, on_disk, types = PLANS[name]
    async with loaded(LLAMA, spec) as plain:
        expected = await said(plain)
        before = dict(held)
    async with loaded(STRATA, spec, **options) as engine:
        assert await said(engine) == expected
        placement = engine.info.placement
    assert placement is not None
    assert placement.found == placement.planned
    assert placement.elsewhere == ()
    if on_disk is not None:
        assert placement.planned["disk"] == on_disk
    assert set(held.values()) == types
    assert set(before.values()) == {"CPU_Mapped"}
    in_ram = {tensor for tensor, kind in held.items() if kind in ("CPU", "RAM")}
    assert all(before[tensor] != held[tensor] for tensor in in_ram)


async def test_what_does_not_fit_into_ram_stays_on_the_disk(spec: EngineSpec):
    enough = await asyncio.to_thread(adapter("strata").need, spec)
    room = Need(ram=(enough.ram - EXPERT_BYTES) * 20 // 19)
    fitted = replace(spec, room=room)
    need = await asyncio.to_thread(adapter("strata").need, fitted)
    assert need.fitted
    assert need.ram <= room.ram
    async with loaded(STRATA, fitted) as engine:
        assert engine.info.placement is not None
        assert engine.info.placement.planned["disk"] >= EXPERT_BYTES
        assert engine.info.placement.found == engine.info.placement.planned


async def test_where_no_plan_exists_the_need_says_so_and_a_load_is_refused(spec: EngineSpec):
    small = replace(spec, room=Need(ram=1_000_000))
    need = await asyncio.to_thread(adapter("strata").need, small)
    assert need.ram > 1_000_000
    with pytest.raises(LlmUnavailable, match=r"out of memory: it needs .* GB of RAM, there are 0\.00 GB"):
        async with loaded(STRATA, small):
            pass


async def test_a_layout_that_is_not_known_is_not_read(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ggml, "version", lambda: "0.9.9 (1.0)")
    async with loaded(LLAMA, spec) as plain:
        expected = await said(plain)
    async with loaded(STRATA, spec, place={"_exps": "disk"}) as engine:
        assert await said(engine) == expected
        assert engine.info.placement is not None
        assert engine.info.placement.found is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_mmap": True}, "strata has no option 'use_mmap'"),
        ({"place": {"(": "disk"}}, "'place' has a pattern that is none"),
        ({"place": {"a": "tape"}}, "'place' is a table of patterns with gpu, ram, disk"),
        ({"place": "disk"}, "'place' is a table"),
        ({"ram_gb": -1}, "'ram_gb' is a number of gigabytes"),
    ],
    ids=str,
)
async def test_a_wrong_option_is_named(spec: EngineSpec, options: dict[str, Any], reason: str):
    with pytest.raises(LlmUnavailable, match=reason):
        await asyncio.to_thread(adapter("strata").need, replace(spec, options=options))


@pytest.mark.skipif(not gpu_offload(), reason="no GPU here: the GPU tier is not run")
async def test_layers_on_the_gpu_are_there(spec: EngineSpec, held: dict[str, str]):
    async with loaded(LLAMA, spec) as plain:
        expected = await said(plain)
    async with loaded(STRATA, spec, n_gpu_layers=-1, place={r"blk\.0\..*_exps": "ram"}) as engine:
        assert (await said(engine))[:4] == expected[:4]
        assert engine.info.placement is not None
        assert engine.info.placement.found == engine.info.placement.planned


# What was computed, kept over an unload.


async def cached(engine: Engine, prompt: list[int]) -> tuple[int, list[int]]:
    pieces = await all_of(engine, Job("again", prompt, Sampling(8, temperature=0, ignore_eos=True)))
    return pieces[0].cached_tokens, tokens_of(pieces)


async def test_a_swap_does_not_cost_the_prefix(spec: EngineSpec):
    first, second = PROMPT, [7, *PROMPT]
    async with loaded(STRATA, spec, session_mb=8) as engine:
        for prompt in (first, second):
            await said(engine, prompt)
        expected = [await cached(engine, prompt) for prompt in (first, second)]
    path = kept.session_path(spec.data_dir or Path(), "moe")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    async with loaded(STRATA, spec, session_mb=8) as engine:
        assert [await cached(engine, prompt) for prompt in (first, second)] == expected
    assert [count for count, _ in expected] == [len(first) - 1, len(second) - 1]


async def test_without_the_option_nothing_is_kept_and_what_was_is_removed(spec: EngineSpec):
    path = kept.session_path(spec.data_dir or Path(), "moe")
    async with loaded(STRATA, spec, session_mb=8) as engine:
        await said(engine)
    assert path.exists()
    async with loaded(STRATA, spec) as engine:
        assert (await cached(engine, PROMPT))[0] == 0
    assert not path.exists()


async def test_what_was_kept_of_other_settings_is_not_used(spec: EngineSpec):
    async with loaded(STRATA, spec, session_mb=8) as engine:
        await said(engine)
    async with loaded(STRATA, spec, session_mb=8, type_k="f32") as engine:
        assert (await cached(engine, PROMPT))[0] == 0


KEPT = llama_session.Kept(
    array("i", range(40)),
    np.arange(150, dtype=np.uint8),
    {20: np.arange(40, dtype=np.uint8), 35: np.arange(10, dtype=np.uint8)},
)


@pytest.mark.parametrize("at", [0, 30, 100, -1])
def test_a_damaged_file_is_removed_and_never_reaches_llama_cpp(tmp_path: Path, at: int):
    path = tmp_path / "a.state"
    assert llama_session.save(path, "of", [KEPT], 1000) == 1
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert llama_session.load(path, "of", 1000) == []
    assert not path.exists()


@pytest.mark.parametrize(("most", "count"), [(359, 0), (360, 1), (719, 1), (720, 2)])
def test_no_more_is_kept_than_allowed(tmp_path: Path, most: int, count: int):
    path = tmp_path / "a.state"
    path.write_bytes(b"of an earlier time")
    assert llama_session.save(path, "of", [KEPT] * 3, most) == count
    assert path.exists() == (count > 0)
    found = llama_session.load(path, "of", most)
    assert [_plain(each) for each in found] == [_plain(KEPT)] * count


def _plain(each: llama_session.Kept) -> tuple[list[int], list[int], dict[int, list[int]]]:
    copies = {length: copy.tolist() for length, copy in each.checkpoints.items()}
    return each.tokens.tolist(), each.data.tolist(), copies


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path):
    path = tmp_path / "a.state"
    with path.open("wb") as file:
        file.truncate(50 << 20)
    assert llama_session.load(path, "of", 1000) == []
    assert not path.exists()


def test_what_is_kept_goes_with_the_model(tmp_path: Path):
    for model in ("here", "gone"):
        path = kept.session_path(tmp_path, model)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    kept.sweep(tmp_path, ["here"])
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == [kept.session_path(tmp_path, "here").name]
