"""GGUF files made into checkpoint folders: once, whole or not at all, whoever else is at it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import small_llama

from engines import gguf_weights
from engines.gguf_header import parameters, read_header
from engines.gguf_weights import ConversionFailed, checkpoint_folder, ensure_checkpoint
from engines.hf_tokenizer import HfTokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama.write(tmp_path_factory.mktemp("source") / "tiny.gguf", pre="smollm")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], int]:
    """The folder, its progress, and how many processes converted, of two callers at the same time."""
    cache = tmp_path_factory.mktemp("cache")
    seen: list[float] = []
    processes: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ensure_checkpoint, source, cache, seen.append, processes.append)
        second = pool.submit(ensure_checkpoint, source, cache, lambda _: None, processes.append)
        assert first.result() == second.result() == checkpoint_folder(source, cache)
    return first.result(), seen, len(processes)


def nothing(_fraction: float) -> None:
    return


def test_two_at_once_make_one_whole_folder(made: tuple[Path, list[float], int]):
    folder, seen, processes = made
    assert processes == 2, "neither knew of the other"
    assert [path.name for path in sorted(folder.parent.iterdir())] == [folder.name, f"{folder.name}.lock"]
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


def test_it_is_reused(source: Path, made: tuple[Path, list[float], int]):
    def unwanted(_process: subprocess.Popen[str]) -> None:
        pytest.fail("it was converted again")

    assert ensure_checkpoint(source, made[0].parent, nothing, unwanted) == made[0]


def test_it_holds_what_vllm_needs(source: Path, made: tuple[Path, list[float], int]):
    folder = made[0]
    config = json.loads((folder / "config.json").read_bytes())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert "quantization_config" not in config
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0 < weights - 2 * parameters(read_header(source).tensors) < 10_000


def test_every_token_that_ends_a_turn_ends_the_output(made: tuple[Path, list[float], int]):
    settings = json.loads((made[0] / "generation_config.json").read_bytes())
    assert settings["eos_token_id"] == [2, 0]


def test_the_tokenizer_and_the_template_are_the_files(made: tuple[Path, list[float], int]):
    tokenizer = HfTokenizer(made[0])
    assert tokenizer.chat_template == small_llama.TEMPLATE
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.context_length == small_llama.CONTEXT
    assert tokenizer.encode("hello<|im_end|>") == [small_llama.TOKENS.index("hello"), 2]


def test_another_file_of_the_same_name_has_a_folder_of_its_own(source: Path, tmp_path: Path):
    other = small_llama.write(tmp_path / "tiny.gguf", seed=1)
    assert other.stat().st_size == pytest.approx(source.stat().st_size, abs=64)
    assert checkpoint_folder(other, tmp_path) != checkpoint_folder(source, tmp_path)


def test_a_conversion_that_was_killed_leaves_no_folder_and_the_next_one_clears_up(source: Path, tmp_path: Path):
    begun = threading.Event()
    processes: list[subprocess.Popen[str]] = []

    def killer() -> None:
        begun.wait()
        processes[0].kill()

    thread = threading.Thread(target=killer)
    thread.start()
    with pytest.raises(ConversionFailed, match=r"tiny\.gguf could not be converted"):
        ensure_checkpoint(source, tmp_path, lambda _: begun.set(), processes.append)
    thread.join()
    folder = checkpoint_folder(source, tmp_path)
    assert not folder.exists()
    left_over = folder.with_name(f"{folder.name}.part-dead")
    left_over.mkdir()
    ensure_checkpoint(source, tmp_path, nothing)
    assert not left_over.exists()
    assert gguf_weights.is_ready(folder)


def test_a_full_disk_is_said_before_anything_is_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 1000))
    with pytest.raises(ConversionFailed, match=r"has 0\.00 GB free, the weights need"):
        gguf_weights.convert(source, tmp_path / "made", nothing)
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_split_file_is_refused(tmp_path: Path):
    part = small_llama.write(tmp_path / "m-00001-of-00002.gguf", parts=2)
    with pytest.raises(ConversionFailed, match="one part of several"):
        gguf_weights.convert(part, tmp_path / "made", nothing)


@pytest.mark.parametrize("content", [None, b"", b"no model"], ids=["missing", "empty", "text"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes | None):
    file = tmp_path / "m.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConversionFailed, match=r"m\.gguf"):
        ensure_checkpoint(file, tmp_path / "cache", nothing)


def test_a_folder_is_itself(tmp_path: Path):
    assert ensure_checkpoint(tmp_path, tmp_path / "cache", nothing) == tmp_path
