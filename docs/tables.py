"""Writes the tables of `citadel/docs/` from the code: `make docs`, or `python -m docs.tables`.

A page asks for a table by `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is replaced. A test fails
while a page is not as this would write it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from citadel import app, cli, config
from citadel.commands.common import EXIT_CODES
from citadel.errors import CITADEL_CODES, TABLE, Row
from citadel.http import openapi
from citadel.http.middleware import speaks_anthropic, speaks_openai
from citadel.runtime.states import MEANINGS, State
from citadel.wire.fields import UNSUPPORTED, WITHOUT_EFFECT

FOLDER = Path(__file__).parent.parent / "citadel" / "docs"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with its tables as they are to be. Raises KeyError for one that nobody makes."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.name}")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# -- the API


def errors() -> str:
    rows = ([row.status, f"`{row.code}`", openapi.MEANINGS[kind], _retry(row)] for kind, row in TABLE.items())
    return _table(["Status", "Code", "Meaning", "Send it again"], rows)


def _retry(row: Row) -> str:
    if not row.should_retry:
        return "after 00:00 UTC"
    match row.status:
        case 429 | 503:
            return "after `Retry-After`"
        case 500:
            return "once"
        case 502:
            return "after 5 to 10 s"
        case _:
            return "no"


def error_types() -> str:
    types: dict[str, list[str]] = {}
    for row in TABLE.values():
        types.setdefault("the code" if row.type == row.code else f"`{row.type}`", []).append(row.code)
    return _table(["Type", "Codes"], ([kind, _code(codes)] for kind, codes in types.items()))


def error_fields() -> str:
    return _table(
        ["Code", "Extra fields"], ([f"`{row.code}`", _code(row.fields)] for row in TABLE.values() if row.fields)
    )


def citadel_codes() -> str:
    return _table(["Status", "Code"], ([status, f"`{code}`"] for status, code in CITADEL_CODES.items()))


def states() -> str:
    return _table(["State", "Meaning"], ([f"`{state.value}`", MEANINGS[state]] for state in State))


def routes() -> str:
    return _table(["Route", "What it is", "Key", "Errors in"], _routes())


def _routes() -> Iterator[Sequence[str]]:
    for path, operations in openapi.document(app.ROUTES)["paths"].items():
        for method, operation in operations.items():
            scope = operation.get("x-scope")
            key = {None: "none", "any": "any"}.get(scope, f"scope `{scope}`")
            shape = "OpenAI's" if speaks_openai(path) else "Anthropic's" if speaks_anthropic(path) else "Citadel's"
            yield f"`{method.upper()} {path}`", operation["summary"], key, shape


def without_effect() -> str:
    return _code(sorted(WITHOUT_EFFECT))


def unsupported() -> str:
    return _table(["Field", "Instead"], ([f"`{name}`", advice] for name, advice in UNSUPPORTED.items()))


# -- models.toml


def _keys_of(model: type[BaseModel]) -> Callable[[], str]:
    def keys() -> str:
        told, schema = _docstrings(model), model.model_json_schema()["properties"]
        rows = (
            [f"`{name}`", _type(schema[name]), _default(field), told.get(name, "")]
            for name, field in model.model_fields.items()
            if name != "sampling"
        )
        return _table(["Key", "Type", "Default", "What it says"], rows)

    return keys


def _docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """The string that stands below each field, which Python itself does not keep."""
    (body,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return found


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f'`"{value}"`' for value in schema["enum"])
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"array of {len(schema['prefixItems'])} numbers"
        case "array":
            return f"array of {_type(schema['items'])}s"
        case "object":
            return "table"
        case other:
            return f"{other}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return "".join(f" {sign} {schema[name]:g}" for name, sign in signs.items() if name in schema)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined:
        return "the user's own"
    if field.default is None:
        return "none"
    # In TOML's words, which for these are JSON's.
    value = json.dumps(field.default) if isinstance(field.default, bool | tuple | str) else field.default
    return f"`{value}`"


# -- the command line


def commands() -> str:
    return _table(["Command", "What it does", "Options"], _commands(cli.parser(), ()))


def _commands(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[Sequence[str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {each.dest: each.help or "" for each in action._choices_actions}
            for name, below in action.choices.items():
                inner = list(_commands(below, (*words, name)))
                if inner:
                    yield from inner
                else:
                    yield f"`{' '.join((*words, name))}`", told[name], _options(below)


def _options(parser: argparse.ArgumentParser) -> str:
    given = [each for each in parser._actions if each.option_strings != ["-h", "--help"]]
    return _code(each.option_strings[-1] if each.option_strings else str(each.metavar or each.dest) for each in given)


def exit_codes() -> str:
    return _table(["Code", "Meaning"], ([code, meaning] for code, meaning in EXIT_CODES.items()))


TABLES: dict[str, Callable[[], str]] = {
    "errors": errors,
    "error_types": error_types,
    "error_fields": error_fields,
    "citadel_codes": citadel_codes,
    "states": states,
    "routes": routes,
    "without_effect": without_effect,
    "unsupported": unsupported,
    "server": _keys_of(config.Server),
    "limits": _keys_of(config.Limits),
    "gpu": _keys_of(config.Gpu),
    "models": _keys_of(config.Model),
    "sampling": _keys_of(config.SamplingDefaults),
    "commands": commands,
    "exit_codes": exit_codes,
}

if __name__ == "__main__":
    main()
