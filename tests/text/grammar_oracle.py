"""Reads calls from raw output in another way than the machine does: strictly, by what each notation says."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from citadel.text.formats import FORMATS, Frame, Tagged

Calls = list[tuple[str, Any]]

_decode = json.JSONDecoder(strict=False).raw_decode

HEADS = {
    "deepseek_v31": r"<｜tool▁call▁begin｜>(\w+)<｜tool▁sep｜>",
    "deepseek_v3": r"function<｜tool▁sep｜>(\w+)\n?```json",
    "kimi_k2": r"<\|tool_call_begin\|>\n?functions\.(\w+):\d+\n?<\|tool_call_argument_begin\|>",
    "mistral": r"(?:\[TOOL_CALLS\]\n?)(\w+)\[ARGS\]",
    "harmony": r"to=functions\.(\w+)(?:<\|channel\|>commentary)? <\|constrain\|>json<\|message\|>",
}


def calls_in(fmt: str, raw: str, schemas: Mapping[str, Any]) -> Calls:
    if fmt in HEADS and re.search(HEADS[fmt], raw):
        return [(found[1], _decode(raw, raw.index("{", found.end()))[0]) for found in re.finditer(HEADS[fmt], raw)]
    if fmt in ("gemma4", "functiongemma"):
        quote = FORMATS[fmt].frames[0].arguments.quote  # type: ignore[union-attr]
        return [
            (found[1], _gemma(found[2], quote))
            for found in re.finditer(r"call:(\w+)(\{.*?\})\s*<(?:tool|end_f)", raw, re.DOTALL)
        ]
    if fmt == "pythonic":
        return _python(raw)
    frame = FORMATS[fmt].frames[0]
    return _tagged(frame, raw, schemas) if isinstance(frame.arguments, Tagged) else _objects(raw)


def _objects(raw: str) -> Calls:
    calls: Calls = []
    at = 0
    while found := re.compile(r'\{"name": ?').search(raw, at):
        value, at = _decode(raw, found.start())
        calls.append((value["name"], value.get("arguments", value.get("parameters"))))
    return calls


def _tagged(frame: Frame, raw: str, schemas: Mapping[str, Any]) -> Calls:
    syntax = frame.arguments
    assert isinstance(syntax, Tagged)
    name = r"<tool_call>\n?(\w+)" if not frame.tail else re.escape(str(frame.head[0])) + r"(\w+)"
    starts = [*re.finditer(name, raw)]
    ends = [each.start() for each in starts[1:]] + [len(raw)]
    header = re.escape(str(syntax.header[0])) + r"(\w+)(?:\" string=)?[^\w]*?(?:true|false)?\"?"
    header += re.escape("</arg_key>") + r"\n?<arg_value>" if "arg" in syntax.close else ">"
    value = re.compile(
        header
        + ("\n" if syntax.trimmed else "")
        + "(.*?)"
        + ("\n" if syntax.trimmed else "")
        + re.escape(syntax.close),
        re.DOTALL,
    )
    calls: Calls = []
    for start, end in zip(starts, ends, strict=True):
        properties = schemas[start[1]].get("properties", {})
        found = value.findall(raw, start.end(), end)
        calls.append((start[1], {key: _typed(text, properties[key]) for key, text in found}))
    return calls


def _typed(text: str, schema: Any) -> Any:
    """As JSON, where the schema can mean that; the texts of strings never look like it."""
    if schema.get("type") == "string" or "enum" in schema:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def _gemma(text: str, quote: str) -> Any:
    parts = text.split(quote)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"(?<=[{,])\s*(\w+):", r'"\1":', parts[at])
    for at in range(1, len(parts), 2):
        parts[at] = json.dumps(parts[at])
    return json.loads("".join(parts))


def _python(raw: str) -> Calls:
    calls: Calls = []
    for found in re.finditer(r"(?:^|>)\s{0,2}(\[.*?\)\])\s*(?:$|<\|python_end|<\|tool_call_end)", raw, re.DOTALL):
        for call in ast.parse(found[1], mode="eval").body.elts:  # type: ignore[attr-defined]
            calls.append((call.func.id, {each.arg: ast.literal_eval(each.value) for each in call.keywords}))
    return calls
