"""The README's walk, command by command as written, on a server whose models play recorded output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import write_script
from tests.process import ROOT, Process

MODELS = """
[server]
data_dir = "data"

[models.smollm2]
engine = "replay"
source = "script.jsonl"

[models.smollm2-vllm]
engine = "replay"
source = "script.jsonl"
"""


def blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    walk = readme.partition("## First tokens")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", walk, re.DOTALL | re.MULTILINE)


def test_a_stranger_gets_from_the_first_token_to_a_media_job(tmp_path: Path) -> None:
    make, *steps = blocks("sh")
    assert "make serve" in make
    write_script(
        tmp_path / "script.jsonl", [{"when": "sea", "pieces": ["The sea", " is deep."]}, {"pieces": ["Hello."]}]
    )
    (tmp_path / "models.toml").write_text(MODELS, encoding="utf-8")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    server = Process(tmp_path)
    said = server.announcement()
    (code,) = blocks("python")
    (tmp_path / "client.py").write_text(code.replace("http://127.0.0.1:8040", said.url), encoding="utf-8")
    script = "\n".join([*steps, ".venv/bin/python client.py"]).replace("hlk_...", str(said.key))
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CITADEL_URL": said.url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert server.stop() == 0
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "The sea is deep."
    assert [line.split()[:2] for line in lines[2:4]] == [["smollm2", "loaded"], ["smollm2-vllm", "stopped"]]
    assert lines[4:6] == ["The sea is deep.", "Hello."]
    assert [line.split()[2:5] for line in lines[6:8]] == [["member", "model", "calls"], ["ann", "smollm2", "1"]]
    assert lines[8:] == ["the GPU is mine", "smollm2 The sea is deep.", "smollm2-vllm The sea is deep."]
