"""The page at `/`: files from `citadel/page/`, without a key; all that it shows comes from `/admin`, with one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

from citadel.errors import NotFound
from citadel.http.guard import Route

_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FOLDER: Final = Path(__file__).parent.parent / "page"
_FILES: Final = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _TYPES}


async def index(request: web.Request) -> web.Response:
    return _file(request, "index.html")


async def file(request: web.Request) -> web.Response:
    return _file(request, request.match_info["name"])


def _file(request: web.Request, name: str) -> web.Response:
    body = _FILES.get(name)
    if body is None:
        raise NotFound
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = {
        hdrs.CONTENT_TYPE: f"{_TYPES[Path(name).suffix]}; charset=utf-8",
        hdrs.CACHE_CONTROL: "no-cache",
        hdrs.ETAG: tag,
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers)


ROUTES: Final = (
    Route("GET", "/", index, None),
    Route("GET", "/page/{name}", file, None, raises=(NotFound,)),
)
