"""Strings as plain text: a schema's `pattern`, `format` and lengths as conditions of a lexeme."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_DATE: Final = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST: Final = rf"{_LABEL}(\.{_LABEL}){{0,8}}"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"

FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}H)?|T[0-9]{1,9}(H([0-9]{1,9}M)?|M([0-9]{1,9}S)?|S))",
    "email": rf"[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}}){{0,4}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+-]{{0,16}}:\/\/{_HOST}(:[0-9]{{1,5}})?(\/[a-zA-Z0-9._~-]{{0,64}}){{0,16}}",
}
"""Of each format what is sure to be valid, which for some is less than all of it."""

_CLASSES: Final = {"d": "0-9", "w": "a-zA-Z0-9_"}


def conditions(schema: Mapping[str, Any], refuse: Callable[[str], None]) -> str:
    """What a lexeme of plain text must also be. `refuse` is told of keywords that can't be written so."""
    parts: list[str] = []
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    if "format" in schema:
        parts.append(f"/{FORMATS[schema['format']]}/") if schema["format"] in FORMATS else refuse("format")
    if "pattern" in schema:
        found = _searched(schema["pattern"])
        parts.append(f"/{found}/") if found is not None else refuse("pattern")
    return "".join(f" & {part}" for part in parts)


def may_be_empty(schema: Mapping[str, Any]) -> bool:
    """Whether the schema's conditions allow the empty string, which no lexeme is."""
    if schema.get("minLength", 0) > 0 or "format" in schema:
        return False
    try:
        return re.search(schema.get("pattern", ""), "") is not None
    except re.error:
        return False


def _searched(pattern: str) -> str | None:
    """A pattern that is searched for, as one that matches the whole text. None if it has anchors inside."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inside = pattern[1 if start else 0 : -1 if end else None]
    written, anchored, alternatives = _translated(inside)
    if anchored or (alternatives and (start or end)):
        return None
    return f"{'' if start else '(?s:.*)'}({written}){'' if end else '(?s:.*)'}"


def _translated(pattern: str) -> tuple[str, bool, bool]:
    """In llguidance's dialect, and whether it has anchors, and alternatives, outside of brackets.

    `\\d` and `\\w` are ASCII in JSON Schema; a slash would end the expression.
    """
    out: list[str] = []
    anchored = alternatives = in_class = False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part[1:] in _CLASSES:
            out.append(_CLASSES[part[1:]] if in_class else f"[{_CLASSES[part[1:]]}]")
            continue
        if part in ("\\D", "\\W") and not in_class:
            out.append(f"[^{_CLASSES[part[1:].lower()]}]")
            continue
        anchored |= part in ("^", "$") and not in_class
        alternatives |= part == "|" and not in_class
        in_class = part == "[" or (in_class and part != "]")
        out.append({"/": "\\/", "\n": "\\n"}.get(part, part))
    return "".join(out), anchored, alternatives
