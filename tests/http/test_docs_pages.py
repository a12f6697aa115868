"""`/docs`: each example is run as it stands on its page, and answers in the shape that the page shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from citadel.http.routes_docs import ORDER, SOURCES, page, title
from citadel.wire.request import ChatBody
from tests.clients.environments import CLIENTS
from tests.conftest import Serving, make_config, serving, write_script
from tests.process import ROOT

HELLO = {"pieces": ["Hello", " there", ",", " my", " dear", " friend", "."]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LINES = [
    {"when": "weather", "pieces": [CALL]},
    {"when": "as JSON", "pieces": ['{"name": "Paris", ', '"capital": true}']},
    {"when": "17 times 3", "pieces": ["Ten threes and seven threes", "</think>", "51"], "reasoning_open": True},
    HELLO,
]
RUNNER = """
import contextlib, io, json, runpy, sys
told = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path)
    told[path] = out.getvalue()
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Example:
    """A piece of code on a page, and what the page shows below it."""

    page: str
    language: str
    code: str
    shown: str | None
    shown_as: str | None


def examples(name: str) -> list[Example]:
    fences = list(re.finditer(r"^```(\w+)\n(.*?)^```$", SOURCES[name], re.DOTALL | re.MULTILINE))
    found: list[Example] = []
    for at, fence in enumerate(fences):
        if fence[1] in ("bash", "python", "javascript"):
            after = fences[at + 1] if at + 1 < len(fences) else None
            below = after is not None and after[1] in ("json", "text")
            close = below and not SOURCES[name][fence.end() : after.start()].strip()
            found.append(Example(name, fence[1], fence[2], *((after[2], after[1]) if close else (None, None))))
    return found


def in_language(language: str) -> list[Example]:
    return [each for name in ORDER for each in examples(name) if each.language == language]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", LINES)
    replay = {"engine": "replay", "source": source, "context_length": 2048, "notes": "plays", "format": "hermes"}
    models = {"smollm2": {**replay, "cold_start_s": 2}, "smollm2-vllm": {**replay, "cold_start_s": 30}}
    models["smollm2-vllm"]["replay"] = {"load_s": 0.5}
    tiny = str(ROOT / "tests" / "models" / "tiny.gguf")
    models["embedder"] = {"engine": "llama", "source": tiny, "task": "embed", "llama": {"pooling": "mean"}}
    async with serving(make_config(tmp_path, models), scopes=("llm", "gpu", "admin")) as running:
        yield running


def environment(server: Serving) -> dict[str, str]:
    return {**os.environ, "CITADEL_URL": server.url, "CITADEL_API_KEY": server.key}


async def run(server: Serving, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env=environment(server), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, told = await process.communicate()
    assert process.returncode == 0, told.decode()
    return out.decode()


def shape(value: Any) -> Any:
    """The names in it, and nothing of what they hold; a list is as its first element."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value[:1]] if isinstance(value, list) else None


def events(text: str) -> list[Any]:
    assert "data: [DONE]" in text
    return [shape(json.loads(line[6:])) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("name", [name for name in ORDER if any(each.language == "bash" for each in examples(name))])
async def test_the_shell_examples_answer_as_shown(server: Serving, name: str) -> None:
    for example in examples(name):
        if example.language != "bash":
            continue
        out = await run(server, "bash", "-euc", example.code)
        match example.shown_as:
            case "json":
                assert shape(json.loads(out)) == shape(json.loads(example.shown or "")), out
            case "text":
                answered = events(out)
                assert all(each in answered for each in events(example.shown or "")), out
            case _ if "-N" in example.code:
                assert events(out)
                assert not re.search(r'"error":', out)
            case _:
                assert not {"error", "ok"} & set(json.loads(out)) or json.loads(out).get("ok") is True, out


async def test_the_python_examples_print_what_is_shown(server: Serving, tmp_path: Path) -> None:
    paths: dict[str, Example] = {}
    for number, example in enumerate(in_language("python")):
        path = tmp_path / f"{number}-{example.page}.py"
        path.write_text(example.code, encoding="utf-8")
        paths[str(path)] = example
    printed = json.loads(await run(server, sys.executable, "-c", RUNNER, *paths))
    assert len(printed) >= 8
    for path, example in paths.items():
        assert printed[path].strip(), example.code
        if example.shown is not None:
            assert printed[path] == example.shown, example.code


@pytest.mark.clients
async def test_the_javascript_examples_print_what_is_shown(server: Serving) -> None:
    """Beside the package that they import, in the environment of the SDK's own row in tests/clients."""
    node = next(client for client in CLIENTS if client.name == "openai_node")
    assert node.installed, f"install it by: python -m tests.clients.environments {node.name}"
    found = in_language("javascript")
    assert len(found) >= 4
    for example in found:
        path = node.folder / f"{example.page}.mjs"
        path.write_text(example.code, encoding="utf-8")
        printed = await run(server, str(node.folder / "bin" / "node"), str(path))
        assert printed.strip(), example.code
        if example.shown is not None:
            assert printed == example.shown, example.code


@pytest.mark.parametrize("name", ORDER)
async def test_a_page_is_open_to_all_and_complete(server: Serving, name: str) -> None:
    path = "/docs" if name == "index" else f"/docs/{name}"
    async with server.session.get(server.url + path, headers={"Authorization": ""}) as response:
        html = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]
    assert "<h1 id=" in html
    assert "<!-- table" not in html
    assert "&lt;!--" not in html
    for link in re.findall(r'href="(/[^"#]*)', html):
        async with server.session.get(server.url + link) as response:
            assert response.status == 200, link
    async with server.session.get(f"{server.url}/docs/{name}.md") as response:
        assert (response.content_type, await response.text()) == ("text/markdown", SOURCES[name])


async def test_another_page_is_not_found_in_the_citadel_format(server: Serving) -> None:
    for path in ("/docs/nothing", "/docs/..%2fapp.py", "/docs/index.html", "/docs/a/b"):
        async with server.session.get(server.url + path) as response:
            body = {"ok": False, "error": "not-found", "code": "not_found", "message": "not found"}
            assert (response.status, await response.json()) == (404, body)


def test_every_page_is_listed_and_every_anchor_is_there() -> None:
    assert {f"{name}.md" for name in ORDER} == {path.name for path in (ROOT / "citadel" / "docs").glob("*.md")}
    assert len({title(name) for name in ORDER}) == len(ORDER)
    for name in ORDER:
        for target, anchor in re.findall(r"\]\(([\w-]+)\.md#([\w-]+)\)", SOURCES[name]):
            assert f'id="{anchor}"'.encode() in page(target), f"{name}: {target}#{anchor}"


def test_the_page_on_chat_names_every_field_that_is_honoured() -> None:
    for field in ChatBody.model_fields:
        assert f"`{field}`" in SOURCES["chat-completions"], field
