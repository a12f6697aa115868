"""`/docs`: the pages of `citadel/docs/`, made into HTML at their first reading; `/docs/NAME.md` is the Markdown itself.

A page joins by being in `ORDER`. Its tables of errors, states, routes, keys and commands are made by `docs/tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from citadel.errors import NotFound
from citadel.http import static
from citadel.http.guard import Route

if TYPE_CHECKING:
    from markdown_it.token import Token

ORDER: Final = (
    "index",
    "chat-completions",
    "models",
    "streaming",
    "tool-calls",
    "json-output",
    "thinking",
    "model-switching",
    "errors",
    "gpu-leases",
    "keys",
    "other-apis",
    "routes",
    "configuration",
    "command-line",
)
_FOLDER: Final = Path(__file__).parent.parent / "docs"
SOURCES: Final = {name: (_FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ORDER}
_FRAME: Final = (_FOLDER / "frame.html").read_text(encoding="utf-8")
_MARKER: Final = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_PAGE_LINK: Final = re.compile(r"([\w-]+)\.md(#.*)?")


async def index(request: web.Request) -> web.Response:
    """The documentation."""
    return static.respond(request, page("index"), "text/html")


async def named(request: web.Request) -> web.Response:
    """A page of the documentation, as HTML or, with `.md`, as Markdown."""
    name = request.match_info["name"]
    if name.removesuffix(".md") not in SOURCES:
        raise NotFound
    if name.endswith(".md"):
        return static.respond(request, _markdown(name.removesuffix(".md")), "text/markdown")
    return static.respond(request, page(name), "text/html")


@cache
def _markdown(name: str) -> bytes:
    return SOURCES[name].encode()


@cache
def page(name: str) -> bytes:
    """The page of this name of `ORDER`, as HTML."""
    links = (f'<li><a href="{_path(each)}"{_here(each == name)}>{escape(title(each))}</a></li>' for each in ORDER)
    parts = {"title": escape(title(name)), "name": name, "pages": "".join(links), "body": _html(SOURCES[name])}
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], _FRAME).encode()


def title(name: str) -> str:
    return SOURCES[name].partition("\n")[0].removeprefix("# ")


def _path(name: str) -> str:
    return "/docs" if name == "index" else f"/docs/{name}"


def _here(current: bool) -> str:
    return ' aria-current="page"' if current else ""


def _html(source: str) -> str:
    from markdown_it import MarkdownIt  # noqa: PLC0415 - a server starts without it

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("table_open", _wide_open)
    markdown.add_render_rule("table_close", _wide_close)
    markdown.add_render_rule("fence", _code)
    tokens = markdown.parse(_MARKER.sub("", source))
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^a-z0-9]+", "-", tokens[at + 1].content.lower()).strip("-"))
        for child in token.children or ():
            if child.type == "link_open" and (found := _PAGE_LINK.fullmatch(str(child.attrs["href"]))):
                child.attrSet("href", _path(found[1]) + (found[2] or ""))
    return markdown.renderer.render(tokens, markdown.options, {})


# What may be wider than a phone scrolls by itself, by keyboard too.


def _wide_open(*_arguments: Any) -> str:
    return '<div class="wide" tabindex="0"><table>'


def _wide_close(*_arguments: Any) -> str:
    return "</table></div>"


def _code(_renderer: Any, tokens: Sequence[Token], at: int, *_arguments: Any) -> str:
    token = tokens[at]
    label = f'<span class="language">{escape(token.info)}</span>' if token.info else ""
    return f'<div class="code">{label}<pre tabindex="0"><code>{escape(token.content)}</code></pre></div>'


ROUTES: Final = (
    Route("GET", "/docs", index, None, content=("text/html",)),
    Route("GET", "/docs/", index, None, content=("text/html",)),
    Route("GET", "/docs/{name}", named, None, content=("text/html", "text/markdown"), raises=(NotFound,)),
)
