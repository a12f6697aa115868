"""`citadel doctor`: each thing that can be wrong is found, with what to do about it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from citadel import cli
from citadel.commands.doctor import PACKAGES, Finding, Package, of_engine, of_folder, of_machine, of_need, of_port
from citadel.engine import Need
from citadel.runtime.machine import GpuDevice, Machine, this
from engines import CATALOGUE
from tests.conftest import write_script

GB = 10**9
PLAIN = Machine("Linux", 2.0, 32 * GB, 32 * GB, 20 * GB, (), None, None)
CARD = GpuDevice("H200", 140 * GB, 139 * GB)
WITH_GPU = Machine("Linux", 2.0, 32 * GB, 16 * GB, 20 * GB, (CARD,), "575", None)
PIP = ("pip",)


def levels(findings: Any) -> list[tuple[str, str]]:
    return [(each.area, each.level) for each in findings]


def doctor(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    (folder / "models.toml").write_text(text, encoding="utf-8")
    data = str(folder / "data")
    code = cli.main(["doctor", "--json", "--config", str(folder / "models.toml"), "--data-dir", data])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (code == 0)
    return code, told["findings"]


def models(folder: Path, source: str) -> str:
    return f'[server]\nport = 0\n\n[models.m]\nengine = "replay"\nsource = "{source}"\n'


def test_a_box_where_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    code, found = doctor(tmp_path, models(tmp_path, source), capsys)
    assert code == 0, found
    assert {each["area"] for each in found} == {"machine", "models.toml", "engines", "weights", "place"}


def test_missing_weights_and_a_wrong_file_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(tmp_path, models(tmp_path, "missing.jsonl"), capsys)
    bad = [each for each in found if each["level"] == "bad"]
    assert code == 1
    assert [each["advice"] for each in bad] == ["correct models.m.source"]
    code, found = doctor(tmp_path, models(tmp_path, "org/name"), capsys)
    bad = [each for each in found if each["level"] == "bad"]
    assert "python -m citadel models pull m" in bad[0]["says"]
    code, found = doctor(tmp_path, '[models.m]\nengine = "lama"\nsource = "x"\n', capsys)
    bad = [each for each in found if each["level"] == "bad"]
    assert (code, bad[0]["area"]) == (1, "models.toml")
    assert "models.m.engine" in bad[0]["says"]
    code, found = doctor(tmp_path, models(tmp_path, "x") + 'slts = 1\nttl_s = "long"\n', capsys)
    told = [each["says"] for each in found if each["area"] == "models.toml"]
    assert sorted("slts: unknown key" in each for each in told) == [False, True]
    assert any("models.m.ttl_s" in each for each in told)
    code, found = doctor(tmp_path, models(tmp_path, "x") + 'format = "nope"\n', capsys)
    assert any("there is no format 'nope'" in each["says"] for each in found)


def test_the_report_is_for_people_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.toml").write_text(models(tmp_path, "missing.jsonl"), encoding="utf-8")
    assert cli.main(["doctor", "--config", str(tmp_path / "models.toml"), "--data-dir", str(tmp_path / "data")]) == 1
    out = capsys.readouterr().out
    assert "-> correct models.m.source\n" in out
    assert out.endswith("1 of these must be put right before all of it works\n")


def test_the_machine_is_described() -> None:
    assert levels(of_machine(PLAIN)) == [("machine", "good"), ("machine", "good"), ("machine", "note")]
    told = [each.says for each in of_machine(WITH_GPU)]
    assert told[1] == "RAM 16.0 GB of 32.0 GB installed, 20.0 GB free"
    assert told[2] == "GPU H200: 140.0 GB, 139.0 GB free, driver 575"
    failing = Machine("Linux", 2.0, GB, GB, GB, (), None, "driver/library version mismatch")
    assert levels(of_machine(failing))[-1] == ("machine", "bad")
    real = this()
    assert 0 < real.ram_free <= real.ram <= real.ram_installed
    assert real.cpus > 0


def test_an_engine_is_tried_in_a_process_of_its_own() -> None:
    def engine(probe: str, has: Machine = PLAIN, names: tuple[str, ...] = PIP, *, used: bool = True) -> Finding:
        return of_engine(Package(("llama",), names, probe), has, used=used)

    assert engine("print('noise'); print('CPU')").says.endswith(" for CPU")
    assert (engine("print('CPU')", WITH_GPU).level, engine("print('GPU')", WITH_GPU).level) == ("note", "good")
    broken = engine("raise ImportError('no lib')")
    assert (broken.level, "ImportError: no lib" in broken.says) == ("bad", True)
    assert "signal 6" in engine("import os; os.abort()").says
    assert engine("", names=("no-such-package",)).level == "bad"
    assert engine("", names=("no-such-package",), used=False).level == "note"
    assert engine("raise ImportError", used=False).level == "good"


def test_each_engine_that_needs_a_package_has_one_to_try() -> None:
    assert {name for package in PACKAGES for name in package.engines} == set(CATALOGUE) - {"replay"}


def test_a_model_must_fit_when_nothing_else_is_loaded() -> None:
    most = Need(ram=8 * GB, gpu=20 * GB)
    assert of_need("m", Need(ram=GB, gpu=20 * GB), most) == Finding(
        "weights", "good", "m: there, takes 20.0 GB of GPU memory and 1.0 GB of RAM"
    )
    short = of_need("m", Need(gpu=21 * GB), most)
    assert (short.level, short.says) == ("bad", "m: takes 21.0 GB of GPU memory, and there are 20.0 GB")
    assert of_need("m", Need(ram=9 * GB), most).level == "bad"


def test_a_port_that_is_taken_or_not_ours_is_told() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert of_port("127.0.0.1", port).level == "note"
    assert of_port("127.0.0.1", 0).level == "good"
    assert of_port("192.0.2.1", 0).level == "bad"


def test_folders_are_writable_and_private(tmp_path: Path) -> None:
    private = tmp_path / "data"
    private.mkdir(mode=0o700)
    assert [each.level for each in of_folder("data_dir", private, private=True)][-1] != "bad"
    private.chmod(0o755)
    assert list(of_folder("data_dir", private, private=True))[-1].advice == f"chmod 700 {private}"
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert [each.level for each in of_folder("data_dir", tmp_path / "file" / "data", private=True)] == ["bad"]
    if os.getuid() != 0:
        private.chmod(0o500)
        assert [each.level for each in of_folder("data_dir", private / "x", private=True)] == ["bad"]
