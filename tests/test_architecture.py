"""The import arrow, who owns which package, and which modules stay pure: read from the source with `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANKS = {
    "citadel.errors": 0,
    "citadel.aio": 0,
    "citadel.logs": 0,
    "citadel.messages": 1,
    "citadel.metrics": 2,
    "citadel.engine": 2,
    "citadel.config": 3,
    "citadel.text": 4,
    "citadel.wire": 4,
    "citadel.accounts": 4,
    "citadel.runtime": 4,
    "citadel.reasoning": 5,
    "citadel.pipeline": 5,
    "citadel.http": 6,
    "citadel.app": 7,
    "citadel.commands": 8,
    "citadel.cli": 8,
    "citadel.__main__": 9,
}
SIBLINGS = ("citadel.text", "citadel.wire", "citadel.accounts", "citadel.runtime")
OWNERS = {
    "aiohttp": ("citadel.http", "citadel.app", "citadel.commands"),
    "sqlite3": ("citadel.accounts.store",),
    "vllm": ("engines",),
    "torch": ("engines",),
    "llama_cpp": ("engines.llama_log",),
    "pynvml": ("citadel.runtime.memory", "citadel.runtime.machine", "engines"),
    "psutil": ("citadel.runtime.memory", "citadel.runtime.machine", "engines"),
    "huggingface_hub": ("citadel.runtime.sources", "engines"),
    "transformers": ("engines",),
    "jinja2": ("citadel.text.jinja",),
    "prometheus_client": ("citadel.metrics",),
    "uvloop": ("citadel.cli",),
    "argparse": ("citadel.cli", "citadel.commands", "engines"),
}
PURE = (
    "citadel.errors",
    "citadel.messages",
    "citadel.engine",
    "citadel.wire",
    "citadel.text",
    "citadel.accounts.auth",
    "citadel.accounts.quota",
    "citadel.runtime.slots",
    "citadel.runtime.gpu_queue",
    "citadel.runtime.states",
    "engines.llama_batch",
    "engines.llama_draft",
    "engines.llama_step",
    "engines.plan",
    "engines.plan_model",
    "engines.plan_cost",
    "engines.plan_patterns",
    "engines.plan_text",
)
IMPURE = {"asyncio", "time", "os", "random", "logging", "threading", "socket", "subprocess"}
ENGINES_MAY_USE = {"citadel.engine", "citadel.messages", "citadel.errors"}


def modules() -> dict[str, ast.Module]:
    found: dict[str, ast.Module] = {}
    for package in ("citadel", "engines"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = modules()


def imports(tree: ast.Module, *, at_run_time: bool = False) -> set[str]:
    """Full names of what a module imports; with `at_run_time`, without what only the type checker sees."""
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                skipped.update(ast.walk(node))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            joined = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(each if each in MODULES else node.module for each in joined)
    return names


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def rank(name: str) -> int | None:
    return next((RANKS[part] for part in RANKS if within(name, part)), None)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "citadel" and name.startswith("citadel")])
def test_imports_point_down_the_arrow(name: str) -> None:
    own = rank(name)
    assert own is not None, f"{name} has no place in the arrow"
    for imported in imports(MODULES[name], at_run_time=True):
        theirs = rank(imported)
        assert theirs is None or theirs <= own, f"{name} imports {imported}"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(SIBLINGS)])
def test_the_four_siblings_never_import_each_other(name: str) -> None:
    own = next(sibling for sibling in SIBLINGS if within(name, sibling))
    for imported in imports(MODULES[name]):
        assert not any(within(imported, other) for other in SIBLINGS if other != own), f"{name} imports {imported}"


@pytest.mark.parametrize("package", OWNERS)
def test_a_package_is_imported_by_its_owners_only(package: str) -> None:
    users = [name for name, tree in MODULES.items() if any(within(each, package) for each in imports(tree))]
    strangers = [name for name in users if not any(within(name, owner) for owner in OWNERS[package])]
    assert not strangers


@pytest.mark.parametrize("name", [name for name in MODULES if any(within(name, part) for part in PURE)])
def test_pure_modules_import_nothing_impure(name: str) -> None:
    assert not imports(MODULES[name], at_run_time=True) & IMPURE


@pytest.mark.parametrize("name", [name for name in MODULES if within(name, "engines")])
def test_engines_know_the_port_and_nothing_else_of_citadel(name: str) -> None:
    assert {each for each in imports(MODULES[name]) if within(each, "citadel")} <= ENGINES_MAY_USE


def test_only_the_composition_root_imports_the_engines() -> None:
    users = {
        name
        for name, tree in MODULES.items()
        if within(name, "citadel") and any(within(each, "engines") for each in imports(tree))
    }
    assert users <= {"citadel.app", "citadel.commands.doctor", "citadel.commands.models", "citadel.commands.plan"}


def _files() -> list[Path]:
    return sorted([*(ROOT / "citadel").rglob("*.py"), *(ROOT / "engines").rglob("*.py")])


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"
