"""vLLM's AsyncLLM as the port's `Engine`. Imports vLLM, which takes seconds: import it in a thread.

The model runs in another process, vLLM's EngineCore. A thread of vLLM's here watches that process, and a task of
vLLM's hands out what it sends; when the process ends, so do they, and every running job is told.
"""

# pyright: reportUnknownMemberType=false
# (vLLM leaves the tasks and sockets of its client without parameters)

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from vllm.exceptions import VLLMClientError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from citadel.engine import EmbedJob, EngineFinish, EngineInfo, EngineSpec, Job, Piece, Vector
from citadel.errors import BadRequest, CitadelError, EdgeError, EngineRestarted, LlmUnavailable
from citadel.messages import TokenLogprob
from engines import embedding, hyperqwen_embed, hyperqwen_inbox
from engines.hf_tokenizer import HfTokenizer
from engines.hyperqwen_jobs import blamed, parameters
from engines.hyperqwen_prefill import Given, Prefill
from engines.hyperqwen_process import Processes
from engines.hyperqwen_swap import Model, swap

_LOG: Final = logging.getLogger("citadel.hyperqwen")

_FINISH: Final[Mapping[str, EngineFinish]] = {"stop": "stop", "length": "length", "repetition": "stop"}

_UNLOADED: Final = "it was unloaded"
_ENDED: Final = "its process ended"
_SWAPPED: Final = "it was swapped for another model"

_GRACE_S: Final = 0.5
"""For vLLM's process to end by itself. It seldom does in time, and has nothing to save."""

_TASKS_S: Final = 5.0
"""For vLLM's two tasks on our event loop to end once their sockets are closed."""


@dataclass(slots=True)
class Parts:
    """What a load made. `folder` holds the engine's log and sockets, and goes with it."""

    llm: AsyncLLM
    processes: Processes
    folder: Path

    async def take_down(self) -> None:
        """Stop everything and leave nothing: process, thread, task, socket, file. Whatever state they are in."""
        await asyncio.to_thread(self._stop)
        await self._end_tasks()
        del self.llm  # vLLM keeps frames of its start, and they would keep this

    async def _end_tasks(self) -> None:
        client: BackgroundResources = self.llm.engine_core.resources
        tasks: list[asyncio.Task[Any] | None] = [self.llm.output_handler, client.output_queue_task]
        if running := [task for task in tasks if task is not None]:
            await asyncio.wait(running, timeout=_TASKS_S)
        await asyncio.to_thread(client.ctx.destroy, 0)

    def _stop(self) -> None:
        self.processes.find()
        self.llm.shutdown(timeout=_GRACE_S)
        self.processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def give_back() -> None:
    """Collect the rings that an AsyncLLM leaves, and let the C library return what it only keeps for later."""
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class VllmEngine:
    def __init__(self, parts: Parts, model: Model, tokenizer: HfTokenizer) -> None:
        self._parts = parts
        self._model = model
        self._tokenizer = tokenizer
        self._running: set[str] = set()
        cache = parts.llm.vllm_config.cache_config
        kept = (cache.num_gpu_blocks or 0) if cache.enable_prefix_caching else 0
        self._prefill = Prefill(model.limits.prefill, Given(cache.block_size, kept))
        self._reason: str | None = None
        self._inquest: asyncio.Task[str] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._handed_over = False
        self._loop = asyncio.get_running_loop()
        self._sentinels = parts.processes.sentinels
        for sentinel in self._sentinels:
            self._loop.add_reader(sentinel, self._on_death)

    @property
    def info(self) -> EngineInfo:
        return self._model.info

    @property
    def dead(self) -> str | None:
        return self._reason or (_ENDED if self._parts.llm.errored else None)

    async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
        self._check_alive()
        if self._model.spec.task != "generate":
            raise BadRequest(f"{self._model.name} makes embeddings and no text")
        wanted = parameters(job, self._model.limits)
        llm, tokenizer = self._parts.llm, self._tokenizer
        logprobs = job.sampling.logprobs
        started = ended = False
        unshown: tuple[int, ...] = ()
        self._running.add(job.id)
        try:
            async with self._prefill.room(job.prompt):
                if self.dead is not None:  # it ended while the job waited
                    raise EngineDeadError
                inbox = await hyperqwen_inbox.ask(llm, job, wanted)
                output = await inbox.get()
            while True:
                part = output.outputs[0]
                token_ids = tuple(part.token_ids)
                text, finish = part.text, None
                if part.finish_reason is not None:
                    ended = True
                    finish = self._finish(part.finish_reason, job, started)
                    text += _cut_character(tokenizer, unshown + token_ids, finish)
                started = True
                unshown = token_ids if text else unshown + token_ids
                yield Piece(
                    text,
                    token_ids,
                    output.num_cached_tokens or 0,
                    () if logprobs is None else _logprobs(tokenizer, part, logprobs),
                    finish,
                )
                if ended:
                    return
                output = await inbox.get()
        except CitadelError:
            raise
        except Exception as error:
            raise await self._translated(error, started) from error
        finally:
            self._running.discard(job.id)
            if not ended:
                # vLLM forgets a request that was cancelled while it was being handed over.
                await llm.abort(job.id)

    async def embed(self, job: EmbedJob) -> AsyncGenerator[Vector, None]:
        self._check_alive()
        if self._model.spec.task != "embed":
            raise BadRequest(f"{self._model.name} makes text and no embeddings")
        limits = self._model.limits
        embedding.check(job, limits.context_length, limits.vocabulary_size)
        started = False
        try:
            async with aclosing(
                hyperqwen_embed.outputs(self._parts.llm, job, self._model.info.slots, self._running)
            ) as tensors:
                async for tensor in tensors:
                    self._check_alive()
                    vector = embedding.unit(tensor)
                    started = True
                    yield vector
        except CitadelError:
            raise
        except Exception as error:
            raise await self._translated(error, started) from error

    def _check_alive(self) -> None:
        if (reason := self.dead) is not None:
            raise EngineRestarted(self._model.name, reason)

    async def swap_to(self, spec: EngineSpec) -> VllmEngine:
        self._reason = self.dead or _SWAPPED
        self._look_away()
        try:
            model = await swap(self._parts.llm, self._model, spec)
        except CitadelError:
            raise
        except Exception as error:
            raise LlmUnavailable(spec.model, f"vLLM could not swap its weights in place: {error!r}") from error
        self._handed_over = True
        return VllmEngine(self._parts, model, self._tokenizer)

    async def close(self) -> None:
        if self._handed_over:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._reason = self._reason or _UNLOADED
        self._look_away()
        await self._parts.llm.abort(list(self._running))
        await self._parts.take_down()
        del self._tokenizer
        await asyncio.to_thread(give_back)

    def _finish(self, reason: str, job: Job, started: bool) -> EngineFinish:
        if (finish := _FINISH.get(reason)) is not None:
            return finish
        if self.dead is not None:
            raise EngineRestarted(self._model.name, self.dead)
        if job.grammar is not None and not started:
            raise BadRequest("The grammar made from the request could not be used")
        raise EdgeError(f"{self._model.name} ended the answer without a reason of ours: {reason}")

    async def _translated(self, error: Exception, started: bool) -> CitadelError:
        if isinstance(error, EngineDeadError) or self.dead is not None:
            return EngineRestarted(self._model.name, self._reason or await asyncio.shield(self._on_death()))
        wrapped = isinstance(error, EngineGenerateError) and error.__cause__ is not None
        cause = error.__cause__ if wrapped else error
        if not started and isinstance(cause, VLLMClientError | ValueError | TypeError):
            return blamed(cause)
        return EdgeError(f"{self._model.name} failed on the request: {cause}")

    def _look_away(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)

    def _on_death(self) -> asyncio.Task[str]:
        """Find out, once, why the engine ended."""
        self._look_away()
        if self._inquest is None:
            self._inquest = asyncio.create_task(self._find_reason())
        return self._inquest

    async def _find_reason(self) -> str:
        reason = await asyncio.to_thread(self._parts.processes.obituary)
        if self._reason is None:
            self._reason = reason
            _LOG.error("the engine of %s ended: %s", self._model.name, reason)
        return self._reason


def _cut_character(tokenizer: HfTokenizer, token_ids: tuple[int, ...], finish: EngineFinish) -> str:
    """What the output ends with if its last tokens are part of a character: vLLM waits for the rest for ever."""
    shown = token_ids[:-1] if finish == "stop" else token_ids
    decoded = tokenizer.decode(shown)
    return decoded[len(decoded.rstrip("\ufffd")) :]


def _logprobs(tokenizer: HfTokenizer, part: CompletionOutput, alternatives: int) -> tuple[TokenLogprob, ...]:
    text_of = tokenizer.token_bytes
    entries: list[TokenLogprob] = []
    positions = cast("Sequence[Mapping[int, Logprob]]", part.logprobs or ())
    for token_id, candidates in zip(part.token_ids, positions, strict=True):
        best = sorted(candidates.items(), key=lambda candidate: -candidate[1].logprob)[:alternatives]
        top = tuple(TokenLogprob(other, text_of(other), candidate.logprob) for other, candidate in best)
        entries.append(TokenLogprob(token_id, text_of(token_id), candidates[token_id].logprob, top))
    return tuple(entries)


class _ExpectedRecords(logging.Filter):
    """Drops what vLLM logs, some of it as an error, each time it is stopped on purpose; we log a death ourselves."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == "AsyncLLM output_handler failed.":
            return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))
        return not str(record.msg).startswith("[shutdown]")


for _name in ("vllm.v1.engine.async_llm", "vllm.v1.engine.core_client", "vllm.v1.utils"):
    logging.getLogger(_name).addFilter(_ExpectedRecords())
