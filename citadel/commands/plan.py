"""`citadel plan`: where a model's weights would live, how fast that is, and what would change it most."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from citadel.commands.common import FAILED, USAGE_ERROR, config_of
from citadel.config import Config, ConfigError, default_data_dir
from citadel.engine import EngineSpec, Need
from citadel.errors import CitadelError
from citadel.runtime import memory, sources
from citadel.runtime.installed import engine_spec
from engines import llama_room, plan_rates, plan_text
from engines.llama_files import Weights, cells
from engines.llama_native import gpu_offload
from engines.llama_options import SMALL_CACHE, settings_of
from engines.plan import NoPlan, place
from engines.plan_cost import forecast, levers

_PLANNED: Final = ("llama", "strata")
_MOST_CHANGES: Final = 5


def show_plan(options: argparse.Namespace) -> int:
    if options.model is None and not options.calibrate:
        print("name a model of models.toml or a .gguf file, or give --calibrate", file=sys.stderr)
        return USAGE_ERROR
    try:
        if options.calibrate:
            _calibrate(options)
        return 0 if options.model is None else _show(options)
    except (CitadelError, sources.SourceMissing, NoPlan) as error:
        print(error.message if isinstance(error, CitadelError) else error, file=sys.stderr)
        return FAILED


def _calibrate(options: argparse.Namespace) -> None:
    """What is measured goes to stderr as it comes, so that --json stays JSON."""
    folder = _data_dir(options, _config(options))
    rates = plan_rates.measure(folder, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"kept in {plan_rates.keep(folder, rates)}", file=sys.stderr)


def _show(options: argparse.Namespace) -> int:
    config = _config(options)
    spec, engine = _spec(options, config)
    free = _free(options, config)
    offload = options.gpu_memory is not None or gpu_offload()
    settings = settings_of(spec, engine)
    weights = Weights(spec)
    room = llama_room.room_of(replace(spec, room=free), settings, offload=offload)
    wish = llama_room.wish_of(settings)
    rates = plan_rates.load(spec.data_dir)
    plan = place(weights.describe(spec, settings), room, wish)
    predicted = forecast(plan, rates)
    half = replace(settings, cells=cells(spec, settings, weights) // 2)
    small = replace(settings, context={**settings.context, **SMALL_CACHE})
    changes = levers(
        plan,
        rates,
        wish,
        {
            "half the context": lambda: weights.describe(spec, half),
            "the cache in q8_0": lambda: weights.describe(spec, small),
        },
    )
    if options.json:
        print(json.dumps(plan_text.as_json(plan, predicted, rates, changes), indent=2))
        return 0
    size, count = weights.table.size / 1e9, cells(spec, settings, weights)
    print(f"{weights.path.name}: {size:.2f} GB of weights, {weights.layers} layers, {count} tokens of cache")
    print(plan_text.show(plan, predicted, rates, changes[:_MOST_CHANGES]))
    return 0


def _spec(options: argparse.Namespace, config: Config | None) -> tuple[EngineSpec, str]:
    """The load that is asked about, and its engine; a file is taken as strata's, with the default settings."""
    name = config.find(options.model) if config else None
    if config and name:
        settings = config.models[name]
        if settings.engine not in _PLANNED:
            raise ConfigError(f"{name} is a model of {settings.engine}, which makes no plans; llama and strata do")
        spec = engine_spec(name, config, sources.locate(name, settings.source, config.folder))
        engine = settings.engine
    else:
        path = _file(options.model, config)
        data_dir = _data_dir(options, config)
        spec, engine = EngineSpec(path.stem, path, None, 1, None, None, data_dir, data_dir=data_dir), "strata"
    changed = {"slots": options.slots, "context_length": options.context}
    return replace(spec, **{key: value for key, value in changed.items() if value is not None}), engine


def _file(said: str, config: Config | None) -> Path:
    """A path, or what else can be a `source` of models.toml."""
    try:
        return sources.locate(said, said, Path())
    except sources.SourceMissing as missing:
        if missing.fetchable:
            pull = "name it as a source in models.toml, then: python -m citadel models pull"
            raise ConfigError(f"the weights of {said} are not, or not all, on this disk; {pull}") from None
        known = f"; there are {', '.join(config.models)}" if config else ""
        raise ConfigError(f"there is no model {said!r}{known}, and no such file") from None


def _config(options: argparse.Namespace) -> Config | None:
    """models.toml, if there is one: a file can be planned without."""
    return config_of(options) if options.config.exists() else None


def _data_dir(options: argparse.Namespace, config: Config | None) -> Path:
    return options.data_dir or (config.server.data_dir if config else default_data_dir())


def _free(options: argparse.Namespace, config: Config | None) -> Need:
    limits = (config.gpu.ram_limit_gb, config.gpu.memory_limit_gb) if config else (None, None)
    free = memory.free([], *limits)
    gpu = options.gpu_memory if options.gpu_memory is not None else free.gpu
    return Need(ram=options.ram if options.ram is not None else free.ram, gpu=gpu)
