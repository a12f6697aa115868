"""`citadel models pull`: looks after the weights."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from citadel.commands.common import FAILED, USAGE_ERROR, config_of, show
from citadel.config import Config
from citadel.errors import CitadelError
from citadel.runtime import sources
from citadel.runtime.installed import engine_spec
from engines import adapter


def pull(options: argparse.Namespace) -> int:
    config = config_of(options)
    wanted = options.model or list(config.models)
    if unknown := [name for name in wanted if name not in config.models]:
        print(f"there is no model {unknown[0]!r}; there are {', '.join(config.models)}", file=sys.stderr)
        return USAGE_ERROR
    rows: list[dict[str, str | None]] = []
    for name in wanted:
        path, problem = _ready(name, config)
        rows.append({"model": name, "path": path, "problem": problem})
        if problem is not None:
            print(f"{name}: {problem}", file=sys.stderr)
        elif not options.json:
            print(f"{name}: ready, {path}", flush=True)
    if options.json:
        show(rows, as_json=True)
    return FAILED if any(row["problem"] for row in rows) else 0


def _ready(name: str, config: Config) -> tuple[str | None, str | None]:
    """Where its weights are, or why they are not there. The hub's client has bars of its own while it fetches."""
    settings = config.models[name]
    try:
        source = sources.locate_or_fetch(name, settings.source, config.folder)
        with Console(stderr=True).status(f"{name}: preparing {source.name}"):
            adapter(settings.engine).open_tokenizer(engine_spec(name, config, source))
    except sources.SourceMissing as missing:
        return None, str(missing)
    except CitadelError as error:
        return None, error.message
    return str(source), None
