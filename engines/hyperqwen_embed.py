"""An `EmbedJob` on vLLM: its texts are requests of their own, several under way at once. Imports vLLM."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (vLLM leaves the outputs of its pooling without parameters)

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any, Final

from vllm.inputs import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

from citadel.engine import EmbedJob

TASK: Final = "embed"


def parameters() -> PoolingParams:
    return PoolingParams(task=TASK)


async def outputs(llm: AsyncLLM, job: EmbedJob, at_once: int, running: set[str]) -> AsyncGenerator[Any, None]:
    """The tensor of each text, in order; of one that vLLM gave up, an empty one. `running`: the requests' ids."""
    numbers, under_way = count(), deque[asyncio.Task[Any]]()
    ids: set[str] = set()
    texts = iter(job.texts)
    try:
        while True:
            for text in texts:
                id_ = f"{job.id}-{next(numbers)}"
                ids.add(id_)
                running.add(id_)
                under_way.append(asyncio.create_task(_tensor(llm, list(text), id_), name=f"embed {id_}"))
                if len(under_way) >= at_once:
                    break
            if not under_way:
                return
            tensor = await asyncio.shield(under_way[0])
            under_way.popleft()
            yield tensor
    finally:
        running -= ids
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if under_way:
            await llm.abort(list(ids))


async def _tensor(llm: AsyncLLM, text: list[int], id_: str) -> Any:
    tensor = None
    async for output in llm.encode(tokens_input(text), parameters(), id_):
        tensor = output.outputs.data
    return tensor
