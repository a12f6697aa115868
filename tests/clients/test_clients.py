"""Other makers' clients against one server, each in an environment of its own: a script does with it what its users do.

A script gets the address, the key and the models as environment variables, asserts, and is content if it ends with 0.
The table in `environments` says where each client comes from. Those that the tests install anyway run with all tests,
the others by `make clients`, which installs them before.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS, Client
from tests.clients.recording import LINES
from tests.conftest import write_script
from tests.models.export import CHECKPOINT
from tests.models.served import TINY_LLAMA, TINY_LLAMA_EMBED, models_toml
from tests.real.conftest import RealServer, started


def chosen(client: Client) -> object:
    return pytest.param(client, id=client.name, marks=() if client.light else pytest.mark.clients)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealServer]:
    folder = tmp_path_factory.mktemp("clients")
    source = write_script(folder / "recording.jsonl", LINES)
    recorded = {"engine": "replay", "source": source, "slots": 4, "format": "hermes"}
    models = models_toml(
        {
            "recorded": recorded,
            "asleep": {**recorded, "cold_start_s": 1, "replay": {"load_s": 1}},
            "tiny": {**TINY_LLAMA, "slots": 8},
            "embedder": TINY_LLAMA_EMBED,
        }
    )
    with started(folder, models) as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", [chosen(client) for client in CLIENTS])
def test_a_client_does_what_its_users_do(server: RealServer, tmp_path: Path, client: Client) -> None:
    assert client.installed, f"install it by: python -m tests.clients.environments {client.name}"
    put_to_sleep(server, "asleep")
    done = subprocess.run(
        client.command(),
        cwd=tmp_path,
        env=environment(server, tmp_path, client),
        capture_output=True,
        text=True,
        check=False,
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
        "CITADEL_TOKENIZER": str(CHECKPOINT),
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
