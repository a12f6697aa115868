"""llama.cpp for models larger than the GPU: the `llama` engine, by a plan that may leave weights on the disk.

plan.py            which tensor lives where (pure); plan_model.py what a file's tensors are for
plan_cost.py       how fast that is; plan_rates.py this machine's bandwidths; plan_text.py a plan in words
plan_patterns.py   a plan in llama.cpp's terms (pure); llama_placing.py handed to it, and read back
llama_room.py      the room that a plan has, and what the registry is told of it
llama_session.py   what an unloaded model had computed, kept for its next load
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines import llama_room
from engines.llama import Llama, loaded_engine

if TYPE_CHECKING:
    from citadel.engine import EngineSpec, Need, Progress
    from engines.llama import LlamaEngine


class Strata(Llama):
    """The adapter; tokenizers are the llama engine's."""

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        return llama_room.need(spec, "strata")

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> LlamaEngine:
        return await loaded_engine(spec, progress, "strata")
