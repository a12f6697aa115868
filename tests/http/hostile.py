"""Requests that nobody should send: made from the table of routes by a seed, the same ones each time."""

from __future__ import annotations

import gzip
import json
import random
import re
import string
from dataclasses import dataclass
from typing import Any

from citadel.http.guard import Route

PROMPT = "prompt-that-no-log-may-have"
"""In every message that is generated."""
STRANGER = "hlk_abcdefgh_" + "S" * 43
"""A key that was never given out."""
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")
_TEXTS = ("", " ", "\x00", "a" * 5000, "é\U0001f600", "<|im_start|>", "</think>", "../..", "%s%n", "{{7*7}}", "\u202e")
_NUMBERS = (0, -1, 1, 2, 9, 0.5, -0.0, 1e308, -1e308, 2**31, 2**63, -(2**64), 10**30, 1e-320)


@dataclass(frozen=True)
class Hostile:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def raw(self) -> bytes:
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: x",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + self.body


def request(seed: int, routes: tuple[Route, ...], keys: tuple[str, ...]) -> Hostile:
    """`keys`: those that may be sent, valid or not."""
    rng = random.Random(seed)
    route = rng.choice(routes)
    path = re.sub(
        r"\{[^}]*\}", lambda _: rng.choice(("m", "a/b", "%00", "%2e%2e", "x" * 300, rng.choice(keys))), route.path
    )
    if rng.random() < 0.1:
        path += rng.choice(("/", "?days=0", "?days=9&days=x", "//", "%", f"?key={rng.choice(keys)}", ";x"))
    body = _body(rng, route, keys)
    headers = _headers(rng, keys, len(body))
    encoding = rng.random()
    if encoding < 0.05:
        body = gzip.compress(body, 1)[: rng.choice((None, -1, 5))]
        headers.append(("Content-Encoding", "gzip"))
    elif encoding < 0.1:
        headers.append(("Content-Encoding", rng.choice(("gzip", "br", "zstd", "deflate", "x", ""))))
    length = len(body) if rng.random() < 0.95 else rng.choice((0, min(1, len(body)), len(body) // 2))
    if rng.random() < 0.05:
        size = f"{len(body):x}" if rng.random() < 0.5 else rng.choice(("zz", "-1", "f" * 20))
        headers.append(("Transfer-Encoding", "chunked"))
        body = f"{size}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    else:
        headers.append(("Content-Length", str(length)))
    method = route.method if rng.random() < 0.9 else rng.choice(_METHODS)
    return Hostile(method, path, headers, body)


def _headers(rng: random.Random, keys: tuple[str, ...], size: int) -> list[tuple[str, str]]:
    headers: list[tuple[str, str]] = []
    if rng.random() < 0.95:
        scheme = "Bearer" if rng.random() < 0.93 else rng.choice(("Basic", "bearer ", "", "Bearer Bearer"))
        headers.append(("Authorization", f"{scheme} {rng.choice(keys)}"))
    if rng.random() < 0.95:
        kinds = ("application/json; charset=utf-8", "text/plain", "application/json\t", "", ";;;", "application/jsonp")
        headers.append(("Content-Type", "application/json" if rng.random() < 0.9 else rng.choice(kinds)))
    odd = {
        "X-LLM-Wait": ("0", "1", "-1", "9" * 50, "1e3", "", "\xb2"),
        "X-Request-Id": ("0" * 16, "f" * 65, rng.choice(keys), "\u00e9"),
        "Expect": ("100-continue", "foo"),
        "Origin": ("null", "https://x.example", "\x7f"),
        "Connection": ("close", "upgrade", "keep-alive, foo"),
        "Upgrade": ("websocket", "h2c"),
        "X-Forwarded-For": (rng.choice(keys), "x" * 7000),
        "Cookie": (f"key={rng.choice(keys)}",),
        "x-api-key": (rng.choice(keys),),
        "Accept": ("text/html", "*/*;q=x"),
        "Range": ("bytes=0-1",),
        "Bad\x01Name": ("x",),
        "": ("x",),
    }
    headers += [(name, rng.choice(values)) for name, values in odd.items() if rng.random() < 0.04]
    if rng.random() < 0.01:
        headers += [(f"X-{index}", "y" * 20) for index in range(rng.choice((100, 5000)))]
    rng.shuffle(headers)
    return headers


def _body(rng: random.Random, route: Route, keys: tuple[str, ...]) -> bytes:
    if route.body is None and rng.random() < 0.8:
        return b""
    given = _plausible(rng, route)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        _spoil(rng, given, keys)
    text = json.dumps(given, ensure_ascii=rng.random() < 0.5, skipkeys=True)
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        cut = rng.randrange(len(raw) + 1)
        raw = rng.choice(
            (raw[:cut], raw + raw, raw[:cut] + rng.randbytes(3) + raw[cut:], b"[" * 5000, b"", b"\xef\xbb\xbf" + raw)
        )
    return raw


def _plausible(rng: random.Random, route: Route) -> dict[str, Any]:
    """A body that has some right fields of the route's model."""
    given: dict[str, Any] = {}
    fields = route.body.model_fields if route.body is not None else {"x": None}
    for name, field in fields.items():
        if (field is not None and field.is_required()) or rng.random() < 0.1:
            given[field.alias or name if field is not None else name] = _RIGHT.get(name) or _value(rng, 2)
    if "messages" in given:
        given["messages"] = [
            {"role": "user", "content": f"{PROMPT} {rng.choice(_TEXTS)}"} for _ in range(rng.choice((1, 1, 3)))
        ]
    return given


_RIGHT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "input": PROMPT,
    "prompt": PROMPT,
    "kind": "image",
    "gpu_memory_gb": 0.001,
    "wait_s": 0,
    "member": "somebody",
    "scopes": ["llm"],
    "stream": True,
    "temperature": 1,
}


def _spoil(rng: random.Random, given: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Put something wrong in one place of `given`, at any depth."""
    node: Any = given
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            break
        place = rng.choice(places)
        if isinstance(node[place], dict | list) and node[place] and rng.random() < 0.7:
            node = node[place]
            continue
        node[place] = rng.choice(keys) if rng.random() < 0.05 else _value(rng, 3)
        break
    if rng.random() < 0.3:
        given["".join(rng.choices(string.ascii_lowercase, k=5))] = _value(rng, 3)


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    match kind:
        case 0:
            return rng.choice(_NUMBERS)
        case 1 | 2:
            return rng.choice((*_TEXTS, PROMPT))
        case 3:
            return rng.choice((None, True, False, float("nan"), float("inf")))
        case 4:
            return "\ud800" if rng.random() < 0.1 else "x"
        case 5:
            return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3, 50)))]
        case _:
            return {
                rng.choice(("type", "text", "name", "role", "content", "x")): _value(rng, depth - 1) for _ in range(3)
            }
