"""The page at `/`: files from `citadel/page/`, without a key; all that it shows comes from `/admin`, with one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiohttp import web

from citadel.errors import NotFound
from citadel.http import static
from citadel.http.guard import Route

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOLDER: Final = Path(__file__).parent.parent / "page"
_FILES: Final = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}


async def index(request: web.Request) -> web.Response:
    """The page."""
    return _file(request, "index.html")


async def file(request: web.Request) -> web.Response:
    """A file of the page."""
    return _file(request, request.match_info["name"])


def _file(request: web.Request, name: str) -> web.Response:
    body = _FILES.get(name)
    if body is None:
        raise NotFound
    return static.respond(request, body, _TYPES[Path(name).suffix])


ROUTES: Final = (
    Route("GET", "/", index, None, content=("text/html",)),
    Route("GET", "/page/{name}", file, None, content=tuple(_TYPES.values()), raises=(NotFound,)),
)
