"""Files that are the same for everybody, and open to all: what the page and the documentation are made of."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Final

from aiohttp import hdrs, web

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def respond(request: web.Request, body: bytes, content_type: str) -> web.Response:
    """`body` with an ETag, or 304 for a client that has it; no script or style but our own files may run in it."""
    tag = _tag(body)
    headers = {
        hdrs.CONTENT_TYPE: f"{content_type}; charset=utf-8",
        hdrs.CACHE_CONTROL: "no-cache",
        hdrs.ETAG: tag,
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if request.headers.get(hdrs.IF_NONE_MATCH) == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers)


@cache
def _tag(body: bytes) -> str:
    """There are as many bodies as files, each kept by who serves it."""
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'
