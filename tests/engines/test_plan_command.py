"""`citadel plan`, on headers without weights and on a model of models.toml."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from gguf_headers import header
from published import write

from citadel.cli import main
from engines import ggml, plan_rates
from engines.plan_cost import Rates


def run(tmp_path: Path, *words: str) -> int:
    return main(["plan", "--config", str(tmp_path / "models.toml"), "--data-dir", str(tmp_path / "data"), *words])


def test_a_header_alone_is_planned_for_a_box_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, "gpt-oss-120b")
    assert run(tmp_path, str(path), "--gpu-memory", "24GB", "--ram", "64GiB", "--context", "32768") == 0
    said = capsys.readouterr().out
    assert said.startswith("gpt-oss-120b.gguf: 63.37 GB of weights, 36 layers, 32768 tokens of cache\nGPU  [###")
    assert "all but experts of layers 0-35; experts of layers" in said
    assert "from assumed bandwidths" in said
    assert "more GPU memory:" in said


def test_json_has_every_tensor_and_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, "dense-70b")
    assert run(tmp_path, str(path), "--gpu-memory", "24GB", "--ram", "16GB", "--context", "8192", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["tensors"]) == 3 + 80 * 9
    assert {tier: said["tiers"][tier]["weights"] > 0 for tier in said["tiers"]} == dict.fromkeys(said["tiers"], True)
    assert said["tokens_per_s"] > 0
    assert {change["what"] for change in said["changes"]} >= {"half the context"}


def test_more_slots_take_more_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, "dense-70b")
    caches: list[int] = []
    for slots in ("1", "4"):
        assert run(tmp_path, str(path), "--ram", "256GB", "--context", "4096", "--slots", slots, "--json") == 0
        caches.append(json.loads(capsys.readouterr().out)["tiers"]["ram"]["cache"])
    assert caches[1] == 4 * caches[0]


def test_a_model_of_the_file_is_planned_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path, "dense-70b")
    (tmp_path / "models.toml").write_text(
        '[models.big]\nengine = "strata"\nsource = "dense-70b.gguf"\ncontext_length = 4096\naliases = ["b"]\n'
        '[models.big.strata]\nram_gb = 20\nplace = { "blk.0." = "disk" }\n'
        '[models.other]\nengine = "replay"\nsource = "x"\n',
        encoding="utf-8",
    )
    assert run(tmp_path, "b", "--ram", "64GB", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tiers"]["ram"]["room"] == 20_000_000_000
    assert said["tensors"]["blk.0.attn_q.weight"] == "disk"
    assert run(tmp_path, "other") == 2
    assert "other is a model of replay, which makes no plans" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["{folder}/dense-70b.gguf", "--ram", "2GB"], 1, r"it needs \d+\.\d+ GB of RAM, there are 1\.90 GB"),
        (["{folder}/lie.gguf"], 1, "names 1000000 tensors"),
        (["{folder}/part-00001-of-00002.gguf"], 1, r"part-00002-of-00002\.gguf is missing"),
        (["{folder}/models.txt"], 1, r"models\.txt can't be loaded: it is not a GGUF file"),
        (["nothing"], 2, "there is no model 'nothing'"),
        (["nobody/nothing-GGUF"], 2, "weights of nobody/nothing-GGUF are not, or not all, on this disk; name it"),
        ([], 2, "name a model"),
    ],
    ids=["too large", "a lie", "a missing part", "no GGUF", "no model", "a hub id", "nothing"],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, says: str
):
    write(tmp_path, "dense-70b")
    metadata = {"general.architecture": "llama", "llama.block_count": 2}
    (tmp_path / "models.txt").write_text("[models]", encoding="utf-8")
    (tmp_path / "lie.gguf").write_bytes(header(metadata, count=10**6))
    (tmp_path / "part-00001-of-00002.gguf").write_bytes(header({**metadata, "split.count": 2}))
    assert run(tmp_path, *(word.format(folder=tmp_path) for word in words)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize("size", ["24", "24GB", "1.5TB", "512MiB", "3 kB"])
def test_sizes_are_read(tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, "nothing", "--ram", size)
    assert "no model 'nothing'" in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(SystemExit):
        run(tmp_path, "nothing", "--ram", "much")


def test_bandwidths_are_kept_for_this_machine_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert plan_rates.load(tmp_path) == Rates()
    measured = Rates(ram=7e9, types={"q4_K": 3e9}, measured=True)
    path = plan_rates.keep(tmp_path, measured)
    assert plan_rates.load(tmp_path) == measured
    monkeypatch.setattr(plan_rates, "machine", lambda: "another")
    assert plan_rates.load(tmp_path) == Rates()
    path.write_text("{", encoding="utf-8")
    assert plan_rates.load(tmp_path) == Rates()


@pytest.mark.parametrize("times", [[1.0, 60.0, 61.0], [1.0, 1.0, 1.0, 50.0], [1.0, 2.0]])
def test_the_fastest_tenth_of_a_few_times_is_none_of_less(times: list[float]):
    """An estimate that goes on below the least of them would be a negative bandwidth."""
    assert 1.0 <= ggml.fastest_tenth(times) < 50.0


def test_calibration_measures_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    measure = plan_rates.measure
    monkeypatch.setattr("engines.ggml._MEASURED_S", 0.02)
    monkeypatch.setattr(plan_rates, "measure", lambda folder, tell: measure(folder, tell, scale=0.02))
    assert run(tmp_path, "--calibrate") == 0
    rates = plan_rates.load(tmp_path / "data")
    assert rates.measured
    assert min(rates.types.values()) > 0
    assert "kept in" in capsys.readouterr().err
