"""The pages beside the code name only what exists, and their commands and examples are taken as written."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from citadel.cli import parser
from citadel.config import Config
from docs.tables import FOLDER, filled

ROOT = Path(__file__).parent.parent
SERVED = tuple(sorted(f"citadel/docs/{path.name}" for path in FOLDER.glob("*.md")))
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/deploy.md", *SERVED)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_paths_and_links_on_a_page_exist(name: str) -> None:
    text = page(name)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:citadel|engines|tests|benchmarks|examples)/[\w/.]+)`", text)
    for path in [*links, *paths]:
        assert (ROOT / path).exists() or (ROOT / name).parent.joinpath(path).exists(), path


def test_the_commands_of_all_pages_parse() -> None:
    text = "\n".join(page(name) for name in PAGES)
    commands = re.findall(r"^.*python -m citadel((?: .*?)?)(?:#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 10
    for command in commands:
        words = shlex.split(re.split(r" --(?= |$)| \| ", command)[0].partition("`")[0])
        if words[:1] == ["COMMAND"]:
            continue
        parser().parse_args(words if words and not words[0].startswith("-") else ["serve", *words])


def test_the_readmes_model_table_is_valid() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", page("README.md"), re.DOTALL)
    assert "mine" in Config.model_validate(tomllib.loads(block)).models


@pytest.mark.parametrize("name", SERVED)
def test_the_tables_of_a_page_are_as_the_code_has_them(name: str) -> None:
    assert page(name) == filled(page(name)), "stale: run `make docs`"


def test_every_make_target_of_the_pages_exists() -> None:
    makefile = page("Makefile")
    for name in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page(name)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name}: make {target}"


def test_the_unit_and_the_image_start_the_server_with_options_that_exist() -> None:
    (unit,) = re.findall(r"^ExecStart=\S+ -m citadel (.*)$", page("deploy/citadel.service"), re.MULTILINE)
    (image,) = re.findall(r'^ENTRYPOINT \["citadel", (.*)\]$', page("deploy/Dockerfile"), re.MULTILINE)
    for words in (shlex.split(unit), shlex.split(image.replace(",", " "))):
        assert parser().parse_args(["serve", *words]).data_dir == Path("/var/lib/citadel")


def test_all_that_a_service_caches_is_in_the_folder_that_it_may_write_to() -> None:
    """vLLM has a folder of its own beside Citadel's: both are found by these."""
    for name in ("deploy/citadel.service", "deploy/Dockerfile", "docs/deploy.md"):
        found = dict(re.findall(r"\b([A-Z_]*(?:HOME|CACHE\w*))=(\S+)", page(name)))
        assert found == dict.fromkeys(("HOME", "XDG_CACHE_HOME"), "/var/cache/citadel"), name


def test_no_page_or_source_names_a_registry_or_this_machine() -> None:
    for path in [
        file
        for kind in ("*.md", "*.toml", "docs/*", "deploy/*", "citadel/**/*.py", "engines/*.py")
        for file in ROOT.glob(kind)
        if file.is_file()
    ]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pypi\.org|huggingface\.co|download\.pytorch|/work/main|/root/", text), path
