"""Files, options and memory of the llama engine: what it refuses, and what it gives back; on a real model."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("llama_cpp")
from llama_cpp import __version__
from rigs import LLAMA, SMOLLM2, Jobs, Rig, all_of, loaded, text_of

from citadel.engine import Engine, EngineSpec, Sampling
from citadel.errors import LlmUnavailable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), *LLAMA.marks]


@pytest.fixture(scope="module")
def rig() -> Rig:
    assert LLAMA.adapter, "imported here, where it holds up no event loop"
    return LLAMA


@pytest.mark.parametrize("size", [4, 5, 23, 1000, 100_000, 2_000_000, 50_000_000])
async def test_a_truncated_file_is_unavailable_and_the_process_lives(spec: EngineSpec, tmp_path: Path, size: int):
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(copy_start, SMOLLM2, cut, size)
    with pytest.raises(LlmUnavailable) as caught:
        await LLAMA.adapter.load(replace(spec, source=cut), lambda _fraction: None)
    assert "cut" in caught.value.fields["reason"] or "not within the file" in caught.value.fields["reason"]


def copy_start(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as file:
        target.write_bytes(file.read(size))


async def test_garbage_behind_the_magic_is_unavailable(spec: EngineSpec, tmp_path: Path):
    source = tmp_path / "garbage.gguf"
    source.write_bytes(b"GGUF\x03\0\0\0" + bytes(range(256)) * 64)
    with pytest.raises(LlmUnavailable):
        await LLAMA.adapter.load(replace(spec, source=source), lambda _fraction: None)


async def test_a_cache_larger_than_the_machine_is_refused_before_it_is_made(spec: EngineSpec):
    with pytest.raises(LlmUnavailable, match="out of memory"):
        await LLAMA.adapter.load(replace(spec, options={"n_ctx": 2_000_000_000}), lambda _fraction: None)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"n_gpu_layer": 1}, "nearest is 'n_gpu_layers'"),
        ({"n_batch": "many"}, "'n_batch' is a whole number"),
        ({"kv_unified": 1}, "'kv_unified' is true or false"),
        ({"type_k": "q9"}, "'type_k' is one of f32"),
        ({"flash_attn": "maybe"}, "'flash_attn' is true, false"),
        ({"tensor_split": 1}, "'tensor_split' is a list"),
    ],
    ids=str,
)
async def test_a_wrong_option_is_named(spec: EngineSpec, option: dict[str, object], reason: str):
    with pytest.raises(LlmUnavailable, match=reason):
        await asyncio.to_thread(LLAMA.adapter.need, replace(spec, options=option))


async def test_options_reach_llama_cpp(spec: EngineSpec, jobs: Jobs):
    options = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True, "n_ubatch": 64, "use_mmap": False}
    async with loaded(LLAMA, spec, **options) as engine:
        assert "Paris" in text_of(await all_of(engine, jobs.make("What is the capital of France?", 20)))


async def test_need_counts_the_cache_of_all_slots(spec: EngineSpec):
    need = LLAMA.adapter.need
    small = await asyncio.to_thread(need, replace(spec, options={"n_ctx": 1024}))
    large = await asyncio.to_thread(need, replace(spec, options={"n_ctx": 2048}))
    per_token = 30 * 3 * (64 + 64) * 2
    assert 1024 * per_token <= large.ram - small.ram <= 1.2 * 1024 * per_token
    assert small.ram > SMOLLM2.stat().st_size


async def test_a_folder_that_holds_one_model_is_a_source(spec: EngineSpec, tmp_path: Path):
    (tmp_path / "model.gguf").symlink_to(SMOLLM2)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"other")
    tokenizer = await asyncio.to_thread(LLAMA.adapter.open_tokenizer, replace(spec, source=tmp_path))
    assert tokenizer.vocabulary_size == 49152
    (tmp_path / "second.gguf").symlink_to(SMOLLM2)
    with pytest.raises(LlmUnavailable, match=r"second\.gguf"):
        await asyncio.to_thread(LLAMA.adapter.open_tokenizer, replace(spec, source=tmp_path))


async def test_a_missing_part_of_a_split_model_is_named(spec: EngineSpec, tmp_path: Path):
    first = tmp_path / "model-00001-of-00002.gguf"
    first.symlink_to(SMOLLM2)
    with pytest.raises(LlmUnavailable, match=r"model-00002-of-00002\.gguf is missing"):
        await asyncio.to_thread(LLAMA.adapter.need, replace(spec, source=first))


async def test_the_fingerprint_names_engine_version_and_file(engine: Engine):
    name, version, revision = engine.info.fingerprint.split("-")
    assert (name, version) == ("llama", __version__)
    assert len(bytes.fromhex(revision)) == 4


async def test_a_load_cancelled_in_mid_file_gives_its_memory_back(spec: EngineSpec):
    loop = asyncio.get_running_loop()
    halfway = asyncio.Event()

    def progress(fraction: float) -> None:
        if fraction > 0.3:
            loop.call_soon_threadsafe(halfway.set)

    before = memory()
    load = asyncio.create_task(LLAMA.adapter.load(replace(spec, options={"use_mmap": False}), progress))
    await halfway.wait()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert memory() - before < 32 << 20


async def test_an_error_in_the_progress_callback_fails_the_load(spec: EngineSpec):
    def progress(fraction: float) -> None:
        if fraction > 0.3:
            raise ValueError("no more")

    threads = threading.active_count()
    with pytest.raises(LlmUnavailable, match="no more"):
        await LLAMA.adapter.load(spec, progress)
    assert threading.active_count() == threads


async def test_loading_and_closing_again_and_again_leaves_threads_and_memory_flat(spec: EngineSpec, jobs: Jobs):
    sizes: list[int] = []
    threads = psutil.Process().num_threads()
    for _ in range(5):
        async with loaded(LLAMA, spec, n_threads=2) as engine:
            await all_of(engine, jobs.of([1], Sampling(max_tokens=1)))
        while psutil.Process().num_threads() > threads + 1:  # noqa: ASYNC110 - the system ends them in its own time
            await asyncio.sleep(0)
        sizes.append(memory())
    assert sizes[-1] - sizes[1] < 16 << 20


def memory() -> int:
    return psutil.Process().memory_info().rss


ABANDON = """
import asyncio, pathlib, sys
from citadel.engine import EngineSpec, Job, Sampling
from engines.llama import Llama

async def main():
    spec = EngineSpec("m", pathlib.Path(sys.argv[1]), None, 2, 256, None, pathlib.Path("."), {"n_threads": 1})
    engine = await Llama.load(spec, lambda _: None)
    running = engine.generate(Job("a", [1, 2, 3], Sampling(max_tokens=200, ignore_eos=True)))
    await anext(running)
    sys.stdout.write("ran")

asyncio.run(main())
"""


async def test_a_program_that_forgets_to_close_still_ends():
    command = [sys.executable, "-c", ABANDON, str(SMOLLM2)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=90, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ran"), ended.stderr


async def test_llama_cpps_errors_are_logged_as_errors(
    spec: EngineSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engines.gguf_parts.Table.check_complete", lambda _table: None)
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(copy_start, SMOLLM2, cut, 50_000_000)
    with caplog.at_level(logging.WARNING, "citadel.llama"), pytest.raises(LlmUnavailable):
        await LLAMA.adapter.load(replace(spec, source=cut), lambda _fraction: None)
    assert any(record.levelno == logging.ERROR and "not within the file" in record.message for record in caplog.records)
