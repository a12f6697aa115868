"""`citadel models`: looks after the weights."""

from __future__ import annotations

import argparse
import sys

from citadel.commands.common import USAGE_ERROR, config_of
from citadel.runtime import sources
from citadel.runtime.installed import engine_spec
from engines import adapter


def pull(options: argparse.Namespace) -> int:
    config = config_of(options)
    wanted = options.model or list(config.models)
    if unknown := [name for name in wanted if name not in config.models]:
        print(f"there is no model {unknown[0]!r}; there are {', '.join(config.models)}", file=sys.stderr)
        return USAGE_ERROR
    failed = False
    for name in wanted:
        settings = config.models[name]
        try:
            source = sources.locate_or_fetch(name, settings.source, config.folder)
            adapter(settings.engine).open_tokenizer(engine_spec(name, config, source))
        except sources.SourceMissing as missing:
            print(f"{name}: {missing}", file=sys.stderr)
            failed = True
        else:
            print(f"{name}: ready, {source}")
    return int(failed)
