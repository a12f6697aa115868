"""Which checkpoints may be swapped in place, told from their files: whatever but the weights differs forbids it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import EngineSpec
from engines.hyperqwen_checkpoint import Answers, identity, swap_key
from tests.models.checkpoints import change_json, make, read_weights, reordered, write_weights


def spec(folder: Path, **options: Any) -> EngineSpec:
    return EngineSpec("m", folder, "batch", 4, 512, None, folder.parent / "cache", options)


def test_two_trainings_of_one_model_have_one_key(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other", reordered)
    (other / "chat_template.jinja").write_text("another template, which is rendered here")
    (other / "README.md").write_text("another model")
    change_json(other / "generation_config.json", temperature=0.3, eos_token_id=[0, 2])
    change_json(other / "config.json", _name_or_path="other", transformers_version="4.0.0")
    assert swap_key(spec(one)) == swap_key(replace(spec(other), model="another")) is not None


def _drop_a_tensor(folder: Path) -> None:
    weights = read_weights(folder)
    del weights["model.layers.1.mlp.down_proj.weight"]
    write_weights(folder, weights)


def _reshape_a_tensor(folder: Path) -> None:
    weights = read_weights(folder)
    dtype, shape, data = weights["model.layers.1.mlp.down_proj.weight"]
    write_weights(folder, {**weights, "model.layers.1.mlp.down_proj.weight": (dtype, shape[::-1], data)})


def _retype_a_tensor(folder: Path) -> None:
    weights = read_weights(folder)
    _, shape, data = weights["model.norm.weight"]
    write_weights(folder, {**weights, "model.norm.weight": ("F16", shape, data)})


def _add_a_token(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a new token"] = 895
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


OTHERS: dict[str, Callable[[Path], Any]] = {
    "a tensor less": _drop_a_tensor,
    "another shape": _reshape_a_tensor,
    "another type": _retype_a_tensor,
    "another token": _add_a_token,
    "another end": lambda folder: change_json(folder / "generation_config.json", eos_token_id=[2]),
    "another architecture": lambda folder: change_json(folder / "config.json", rms_norm_eps=1e-5),
    "a file of its own": lambda folder: (folder / "preprocessor_config.json").write_text("{}"),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=list(OTHERS))
def test_whatever_else_differs_forbids_it(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other", reordered)
    change(other)
    assert swap_key(spec(other)) not in (None, swap_key(spec(one)))


def test_tied_and_untied_embeddings_are_two_architectures(tmp_path: Path) -> None:
    one, tied = make(tmp_path / "one"), make(tmp_path / "tied", tied=True)
    assert swap_key(spec(one)) != swap_key(spec(tied)) is not None


@pytest.mark.parametrize(
    "settings", [{"slots": 8}, {"context_length": 256}, {"mode": "single"}, {"memory_bytes": 1}, {"options": {"a": 1}}]
)
def test_other_settings_forbid_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = make(tmp_path / "one")
    assert swap_key(replace(spec(folder), **settings)) not in (None, swap_key(spec(folder)))


def _write(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


BROKEN: dict[str, Callable[[Path], Any]] = {
    "cut": _cut,
    "empty": _write(b""),
    "no length": _write(b"abc"),
    "a header longer than the file": _write(b"\xff" * 100),
    "no JSON": _write((4).to_bytes(8, "little") + b"{no}"),
    "a list": _write((2).to_bytes(8, "little") + b"[]"),
    "no tensors": _write((2).to_bytes(8, "little") + b"{}"),
    "tensors that are none": _write((8).to_bytes(8, "little") + b'{"a": 1}'),
    "a configuration that is none": lambda folder: (folder / "config.json").write_text("["),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_checkpoint_has_no_key(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    folder = make(tmp_path / "one")
    damage(folder)
    assert swap_key(spec(folder)) is None


def test_a_missing_checkpoint_has_no_key(tmp_path: Path) -> None:
    assert swap_key(spec(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    "options",
    [
        {"load_format": "dummy"},
        {"worker_extension_cls": "mine.Worker"},
        {"enable_lora": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "eagle", "model": "drafts"}},
    ],
)
def test_options_that_a_reload_would_not_serve_have_no_key(tmp_path: Path, options: dict[str, Any]) -> None:
    assert swap_key(spec(make(tmp_path / "one"), **options)) is None


def test_speculation_without_a_model_of_its_own_is_no_obstacle(tmp_path: Path) -> None:
    options = {"load_format": "safetensors", "speculative_config": {"method": "ngram"}}
    assert swap_key(spec(make(tmp_path / "one"), **options)) is not None


def test_the_identity_of_a_checkpoint_changes_with_its_files(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    before = identity(folder)
    assert identity(folder) == before
    assert identity(make(tmp_path / "two")) != before
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert identity(folder) != before


def test_an_answer_is_kept_for_one_checkpoint_and_one_engine(tmp_path: Path) -> None:
    answers, answer = Answers(tmp_path / "answers", "1.0"), [-1.5, -0.1, -1e-300]
    assert answers.read("key", "identity") is None
    answers.write("key", "identity", answer)
    assert answers.read("key", "identity") == Answers(tmp_path / "answers", "1.0").read("key", "identity") == answer
    assert answers.read("key", "other") is answers.read("other", "identity") is None
    assert Answers(tmp_path / "answers", "1.1").read("key", "identity") is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[1, "])
def test_an_answer_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    answers = Answers(tmp_path, "1.0")
    answers.write("key", "identity", [1.0])
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert answers.read("key", "identity") is None
