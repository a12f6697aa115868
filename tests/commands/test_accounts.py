"""`keys`, `members` and `usage` on a database that no server has open, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from citadel import cli
from citadel.accounts.store import Store
from tests.process import ROOT


@pytest.fixture
def citadel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command on the data directory of this test; returns its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main([*words, "--data-dir", str(tmp_path / "data")])
        return code, *capsys.readouterr()

    return run


def test_a_key_is_made_rotated_and_revoked_as_json(citadel: Any, tmp_path: Path) -> None:
    code, out, _ = citadel("keys", "create", "--member", "ann", "--scope", "llm", "--json")
    first = json.loads(out)
    assert (code, first["key"].startswith(f"hlk_{first['id']}_")) == (0, True)
    code, out, _ = citadel("keys", "rotate", first["id"], "--json")
    second = json.loads(out)
    assert (code, second["id"] != first["id"]) == (0, True)
    assert citadel("keys", "revoke", second["id"], "--json") == (0, json.dumps({"revoked": second["id"]}) + "\n", "")
    code, out, _ = citadel("keys", "list", "--json")
    assert {row["id"] for row in json.loads(out)} == {first["id"], second["id"]}
    assert citadel("keys", "revoke", "nope") == (1, "", "there is no live key 'nope'\n")


def test_the_key_is_the_last_line(citadel: Any) -> None:
    code, out, _ = citadel("keys", "create", "--member", "ann", "--scope", "llm")
    assert (code, out.splitlines()[-1].startswith("hlk_")) == (0, True)


@pytest.mark.parametrize("words", [("keys", "list"), ("members", "list"), ("usage",)])
def test_a_database_that_cannot_be_used_is_one_line(citadel: Any, tmp_path: Path, words: Any) -> None:
    damage(tmp_path)
    told = f"{tmp_path / 'data' / 'citadel.db'}: cannot be used: file is not a database\n"
    assert citadel(*words) == (1, "", told)


def test_a_server_ends_with_one_line_where_its_data_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[models.m]\nengine = "replay"\nsource = "x"\n', encoding="utf-8")
    damage(tmp_path)
    path = tmp_path / "data" / "citadel.db"
    for data_dir, told in (
        (tmp_path / "data", f"{path}: cannot be used: file is not a database"),
        (path, f"the data directory {path} cannot be used: File exists"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "citadel", "--data-dir", str(data_dir)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, told)
        assert "Traceback" not in done.stderr


def damage(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "citadel.db").write_bytes(b"no database" * 100)


def test_a_newer_database_is_left_alone(citadel: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    store._db.execute("PRAGMA user_version = 999")
    store.close()
    code, _, told = citadel("keys", "list")
    assert (code, "it is of a newer Citadel (version 999" in told) == (1, True)
