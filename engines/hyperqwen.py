"""The engine `hyperqwen`: vLLM's AsyncLLM, embedded. There is no HTTP inside, but there is a process per model.

    hyperqwen.py           the adapter: need, open_tokenizer, load
    hyperqwen_memory.py    what a load takes; hyperqwen_args.py  how vLLM is to be started: both without vLLM
    hyperqwen_start.py     a process of vLLM started
    hyperqwen_engine.py    the loaded engine; hyperqwen_process.py  its processes
    hyperqwen_jobs.py      a job for it; hyperqwen_prefill.py  when its prompt is handed over
    hyperqwen_inbox.py     what is made for it; hyperqwen_embed.py  one of embeddings
    hyperqwen_checkpoint.py  which models can be swapped in place; hyperqwen_swap.py  such a swap, and its check
    hyperqwen_child.py     what runs in those processes, so that they end with the server
    hyperqwen_worker.py    what else runs there: missing tensors noticed, the weights of a running model exchanged
    gguf_weights.py        a GGUF file made into a checkpoint folder; hf_tokenizer.py  the tokenizer of such a folder

Importing this module is cheap; vLLM and torch are imported by the first `load`, in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Coroutine, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from citadel.engine import EngineSpec, Need, Progress
from citadel.errors import CitadelError, LlmUnavailable
from engines import hyperqwen_args, hyperqwen_checkpoint, hyperqwen_child, hyperqwen_memory
from engines.gguf_weights import ConversionFailed, ensure_checkpoint
from engines.hf_tokenizer import HfTokenizer, context_length, read_json
from engines.hyperqwen_process import Processes

if TYPE_CHECKING:
    from engines.hyperqwen_engine import VllmEngine
    from engines.hyperqwen_start import Built

T = TypeVar("T")

_LOG: Final = logging.getLogger("citadel.hyperqwen")

_STARTING: Final = threading.Lock()
"""One engine is started at a time: starting reads and writes the process's environment."""

_CONVERTED, _IMPORTED, _CONFIGURED, _STARTED = 0.4, 0.5, 0.55, 0.97
"""How far a load is after each of its steps. vLLM says nothing of the longest, between the last two."""

_CANCEL_POLL_S: Final = 0.1

_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes the sockets that its processes talk over; it leaves them there."""

_ANSWER_S: Final = 60.0
"""For the first answer of an engine that has started."""


class Hyperqwen:
    """Implements the port's `Adapter`, and `SwapAdapter`."""

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        return hyperqwen_memory.need(spec, hyperqwen_memory.platform())

    @staticmethod
    def open_tokenizer(spec: EngineSpec) -> HfTokenizer:
        """Of a GGUF file it is the converted folder's, so the first call for one converts it."""
        try:
            return HfTokenizer(ensure_checkpoint(spec.source, spec.cache_dir, _unheard))
        except ConversionFailed as error:
            raise LlmUnavailable(spec.model, str(error)) from error
        except Exception as error:  # tokenizers raises bare Exceptions
            raise LlmUnavailable(spec.model, f"its tokenizer can't be read: {error}") from error

    @staticmethod
    def swap_key(spec: EngineSpec) -> str | None:
        return hyperqwen_checkpoint.swap_key(spec)

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> VllmEngine:
        """A cancelled load ends when its thread has: its processes are killed, but an import takes its seconds."""
        load = _Load(spec, progress)
        # A future, not a task: the end of the event loop cancels tasks, and no thread.
        thread = asyncio.get_running_loop().run_in_executor(None, load.run)
        try:
            built = await asyncio.shield(thread)
        except asyncio.CancelledError:
            await _to_the_end(_undo(load, thread))
            raise
        try:
            progress(_STARTED)
            await asyncio.wait_for(built.first_answer(), _ANSWER_S)
            progress(1.0)
            return built.engine()
        except BaseException as error:
            reason = await _to_the_end(_given_up(built))
            if isinstance(error, LlmUnavailable):
                raise
            if isinstance(error, Exception):
                raise LlmUnavailable(spec.model, f"it started, and then failed: {reason or _said(error)}") from error
            raise


class _Load:
    """One load's work in its thread, and what may end it from outside."""

    def __init__(self, spec: EngineSpec, progress: Progress) -> None:
        self._spec = spec
        self._progress = progress
        self._cancelled = False
        self._conversion: subprocess.Popen[str] | None = None
        self._processes: Processes | None = None

    def run(self) -> Built:
        try:
            self._progress(0.0)
            source, cache_dir = self._spec.source, self._spec.cache_dir
            checkpoint = ensure_checkpoint(
                source, cache_dir, lambda done: self._progress(done * _CONVERTED), self._set_conversion
            )
            while not _STARTING.acquire(timeout=_CANCEL_POLL_S):
                self._stop_if_cancelled()
            try:
                return self._start(checkpoint)
            finally:
                _STARTING.release()
        except CitadelError:
            raise
        except Exception as error:
            raise LlmUnavailable(self._spec.model, str(error) or type(error).__name__) from error
        finally:
            # Some module keeps the frames that first imported vLLM, and so us: not the processes with their pipes, too.
            self._processes = None

    def kill(self) -> None:
        """Make `run` end soon: it raises, or returns what must be taken down. To be called until it has."""
        self._cancelled = True
        if self._conversion is not None:
            self._conversion.kill()
        if (processes := self._processes) is not None:
            processes.kill()

    def _set_conversion(self, process: subprocess.Popen[str]) -> None:
        self._conversion = process

    def _start(self, checkpoint: Path) -> Built:
        spec, owner = self._spec, dict(os.environ)
        where = hyperqwen_memory.platform()
        plan = plan_here(spec, checkpoint, where, owner)
        with _environment({**plan.environment, hyperqwen_child.SERVER: str(os.getpid())}):
            with warnings.catch_warnings(action="ignore"):  # vLLM and torch give some about their own code
                from engines import hyperqwen_start  # noqa: PLC0415 - this is the import of vLLM

            self._reached(_IMPORTED)
            configured = hyperqwen_start.configure(spec, plan)
            self._reached(_CONFIGURED)
            _LOG.info("starting vLLM for %s: %s", spec.model, plan.layout)
            folder = Path(tempfile.mkdtemp(prefix="citadel-hyperqwen-", dir=owner.get(_SOCKETS)))
            os.environ[_SOCKETS] = str(folder)  # with the others, it is set back
            self._processes = Processes(folder / "log")
            try:
                return hyperqwen_start.start(spec, configured, checkpoint, folder, self._processes, where)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def _reached(self, fraction: float) -> None:
        self._progress(fraction)
        self._stop_if_cancelled()

    def _stop_if_cancelled(self) -> None:
        if self._cancelled:
            raise LlmUnavailable(self._spec.model, "the load was cancelled")


def plan_here(
    spec: EngineSpec, checkpoint: Path, where: hyperqwen_args.Platform, owner: Mapping[str, str]
) -> hyperqwen_args.Plan:
    """How vLLM is started on this box for the model in `checkpoint`. `owner`: the environment."""
    kv_bytes = hyperqwen_memory.kv_bytes(spec, where)
    config = read_json(checkpoint / "config.json")
    context = spec.context_length or context_length(config)
    dtype = hyperqwen_memory.dtype(spec, config, where)
    cores = hyperqwen_memory.physical_cores(os.sched_getaffinity(0))
    return hyperqwen_args.make_plan(spec, checkpoint, where, context, dtype, kv_bytes, cores, owner)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Generator[None]:
    """These variables for a while. vLLM sets more as it starts, LD_PRELOAD among them: all are set back."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


async def _undo(load: _Load, thread: asyncio.Future[Built]) -> None:
    while not thread.done():
        await asyncio.to_thread(load.kill)
        await asyncio.wait({thread}, timeout=_CANCEL_POLL_S)
    if thread.exception() is None:
        await thread.result().parts.take_down()


async def _given_up(built: Built) -> str | None:
    """Take it down; returns the last error that it logged."""
    reason = await asyncio.to_thread(built.parts.processes.last_error)
    await built.parts.take_down()
    return reason


async def _to_the_end(work: Coroutine[None, None, T]) -> T:
    """Await `work` however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    return task.result()


def _said(error: Exception) -> str:
    return "it did not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _unheard(_fraction: float) -> None:
    return
