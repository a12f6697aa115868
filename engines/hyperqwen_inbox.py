"""What vLLM makes for a job, taken where its handler of outputs leaves it: the way of each piece. Imports vLLM.

`AsyncLLM.generate` has a generator and an event between, and they cost a tenth of all that this process does for a
piece. This is its way without them: ask, then take outputs until one has a finish reason.
"""

from __future__ import annotations

import asyncio
from collections import deque

from vllm.inputs import tokens_input
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from citadel.engine import Job


class Inbox(RequestOutputCollector):
    """A request's outputs one by one, for one reader on the event loop."""

    def __init__(self, wanted: SamplingParams, request_id: str) -> None:
        super().__init__(wanted.output_kind, request_id)
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[RequestOutput | PoolingRequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Called by vLLM. An exception says that the engine has failed."""
        self._outputs.append(output)
        if (waiter := self._waiter) is not None:
            self._waiter = None
            if not waiter.done():  # the reader may have been cancelled
                waiter.set_result(None)

    def get_nowait(self) -> RequestOutput | None:
        """The next output if there is one. Raises what the engine has failed with."""
        if not self._outputs:
            return None
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        assert isinstance(output, RequestOutput)
        return output

    async def get(self) -> RequestOutput:
        while (output := self.get_nowait()) is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        return output


async def ask(llm: AsyncLLM, job: Job, wanted: SamplingParams) -> Inbox:
    """Hand `job` to the engine. Raises what vLLM says of it."""
    collector = await llm.add_request(job.id, tokens_input(list(job.prompt)), wanted)
    inbox = Inbox(wanted, collector.request_id)
    if (early := collector.get_nowait()) is not None:
        inbox.put(early)
    if (state := llm.output_processor.request_states.get(collector.request_id)) is not None:
        state.queue = inbox
    return inbox
