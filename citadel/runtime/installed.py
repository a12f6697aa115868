"""What is known of a configured model before it is loaded: its files, its tokenizer, the memory it will take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from citadel.config import Config
from citadel.engine import Adapter, EngineSpec, Need, SwapAdapter, Tokenizer
from citadel.runtime import memory, sources
from citadel.runtime.gpu_queue import Resident

AdapterOf = Callable[[str], type[Adapter]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """`chat_template` is the owner's where models.toml names one, else the checkpoint's. `swap_key` as in the port."""

    adapter: type[Adapter]
    spec: EngineSpec
    tokenizer: Tokenizer
    need: Need
    chat_template: str | None
    swap_key: str | None = None


def engine_spec(model: str, config: Config, source: Path, room: Need | None = None) -> EngineSpec:
    settings = config.models[model]
    return EngineSpec(
        model=model,
        source=source,
        mode=settings.effective_mode,
        slots=settings.effective_slots,
        context_length=settings.context_length,
        memory_bytes=int(settings.memory_gb * 1e9) if settings.memory_gb else None,
        cache_dir=config.server.cache_dir,
        options=settings.options,
        data_dir=config.server.data_dir,
        room=room,
        task=settings.task,
    )


def prepare(
    model: str, config: Config, adapter_of: AdapterOf, *, fetch: bool, residents: Sequence[Resident] = ()
) -> Prepared:
    """Blocks: call in a thread. `residents` are what is loaded now.

    Raises sources.SourceMissing, or LlmUnavailable for files that cannot be used.
    """
    settings = config.models[model]
    find = sources.locate_or_fetch if fetch else sources.locate
    source = find(model, settings.source, config.folder)
    adapter = adapter_of(settings.engine)
    spec = engine_spec(model, config, source, room(config, residents))
    tokenizer = adapter.open_tokenizer(spec)
    template = tokenizer.chat_template
    if settings.chat_template is not None:
        template = (config.folder / settings.chat_template).read_text(encoding="utf-8")
    return Prepared(adapter, spec, tokenizer, adapter.need(spec), template, _swap_key(adapter, spec))


def _swap_key(adapter: object, spec: EngineSpec) -> str | None:
    return adapter.swap_key(spec) if isinstance(adapter, SwapAdapter) else None


def room(config: Config, residents: Sequence[Resident]) -> Need | None:
    """What a load may count on: what is free, and what the models that may be unloaded for it give back.

    None where it can't be measured: the load is then planned for the machine, and the queue sees whether it fits.
    """
    gpu = config.gpu
    try:
        free = memory.free([each.need for each in residents], gpu.ram_limit_gb, gpu.memory_limit_gb)
    except OSError:
        return None
    given = [each.need for each in residents if not each.pinned]
    return Need(free.ram + sum(each.ram for each in given), free.gpu + sum(each.gpu for each in given))
