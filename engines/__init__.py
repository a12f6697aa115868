"""The engines by name, as strings: importing this package imports none of them, nor torch, nor llama.cpp."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from citadel.engine import Adapter

CATALOGUE: Final[dict[str, str]] = {
    "hyperqwen": "engines.hyperqwen:Hyperqwen",
    "llama": "engines.llama:Llama",
    "strata": "engines.strata:Strata",
    "replay": "engines.replay:Replay",
}

EARLY: Final = frozenset({"llama", "strata"})
"""What a server imports of its models' engines once it listens, so that nobody waits for it: a quarter of a second and
some 30 MB of llama.cpp. vLLM takes seconds, and half a gigabyte."""


def adapter(name: str) -> type[Adapter]:
    """The adapter class of an engine in `CATALOGUE`. Its first import may take seconds: call it in a thread."""
    module, _, attribute = CATALOGUE[name].partition(":")
    return getattr(import_module(module), attribute)
