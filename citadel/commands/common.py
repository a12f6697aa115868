"""What the commands share: how their options become a configuration, and how they print tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from citadel import config as configuration
from citadel.config import Config

FAILED: Final = 1
USAGE_ERROR: Final = 2
NO_LEASE: Final = 75
NO_COMMAND: Final = 127
STOPPED: Final = 130

EXIT_CODES: Final[dict[int, str]] = {
    0: "all is well",
    FAILED: "what was asked for failed, or the server refused it or is not there; stderr has one line that says why",
    USAGE_ERROR: "the command line or models.toml is wrong",
    NO_LEASE: "`gpu`: no lease was to be had in time, or it was lost; try again later",
    NO_COMMAND: "`gpu`: the command could not be started; otherwise `gpu` ends with the command's own code",
    STOPPED: "stopped by Ctrl-C",
}


class CommandFailed(Exception):
    """A command ends with `FAILED`; the message is the one line that says why."""


def config_of(options: argparse.Namespace) -> Config:
    """models.toml, with the command line's options in the place of its own. Raises ConfigError."""
    given = {name: getattr(options, name, None) for name in ("host", "port", "data_dir")}
    overrides = {name: value for name, value in given.items() if value is not None}
    return configuration.load(options.config, server_overrides=overrides)


def data_dir_of(options: argparse.Namespace) -> Path:
    """For commands that need no models: the flag alone is enough, without a models.toml."""
    return options.data_dir or config_of(options).server.data_dir


def show(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Rows with the same columns: as JSON, or as a table that fits its words."""
    if as_json:
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    if not rows:
        print("none")
        return
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    for line in [names, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)
