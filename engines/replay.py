"""Plays recorded output at a chosen pace: for tests, for developers of clients, for benchmarks of the server itself.

The model's `source` is a JSONL script. Each line has `pieces` (a list of strings, each delivered as one piece and
counted as one token) and may have
- `when`: a substring of the last message of the user or of a tool; the first line that fits is played, one without
  `when` fits all;
- `behind`: how the prompt must end for the line to fit, for a job that goes on with an output;
- `delay_ms`: the time before each piece;
- `reasoning_open`: the output starts inside reasoning, as after a template that opens the block itself;
- `finish`: `stop` (the default) or `length`;
- `fail`: `die` (the whole engine), `stall` (no further piece) or `error` (this job), `after` that many pieces.

`[models.X.replay]` has `load_s`, the time a load takes, and `family`: models of one family that are loaded alike swap
in place. A token is a Unicode code point. Sampling has no effect here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from citadel.engine import EmbedJob, EngineFinish, EngineInfo, EngineSpec, Job, Need, Piece, Progress, Vector
from citadel.errors import BadRequest, ContextLengthExceeded, EdgeError, EngineRestarted, LlmUnavailable

CONTEXT_LENGTH: Final = 1_000_000
_VOCABULARY: Final = 0x110000
_HEARD: Final = re.compile(r"<\|(?:user|tool)\|>")
_PROGRESS_STEPS: Final = 10
_TEMPLATE: Final = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content or '' }}<|end|>{%- endfor -%}"
    "{%- set heard = messages | selectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | list -%}"
    "{%- set last = (heard | last) or '' -%}"
    "{%- if add_generation_prompt -%}<|assistant|>__THINK__{%- endif -%}"
)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    pieces: tuple[str, ...]
    when: str | None = None
    behind: str = ""
    delay_ms: float = Field(default=0, ge=0)
    reasoning_open: bool = False
    finish: EngineFinish = "stop"
    fail: Literal["die", "stall", "error"] | None = None
    after: int = Field(default=0, ge=0)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    load_s: float = Field(default=0, ge=0)
    family: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayTokenizer:
    chat_template: str
    special_tokens: Mapping[str, str]
    context_length: int | None = CONTEXT_LENGTH
    vocabulary_size: int = _VOCABULARY

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:  # noqa: ARG002 - it has none
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Replay:
    """The adapter."""

    @staticmethod
    def need(spec: EngineSpec) -> Need:
        return Need(ram=spec.memory_bytes if spec.memory_bytes is not None else spec.source.stat().st_size)

    @staticmethod
    def open_tokenizer(spec: EngineSpec) -> ReplayTokenizer:
        return ReplayTokenizer(_template(_read(spec)), {"bos_token": "", "eos_token": "<|end|>"})

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> ReplayEngine:
        try:
            options = _Options.model_validate(spec.options)
        except ValidationError as error:
            raise LlmUnavailable(spec.model, f"the table 'replay': {_short(error)}") from None
        lines, revision = await asyncio.to_thread(_read_with_revision, spec)
        for step in range(_PROGRESS_STEPS):
            progress(step / _PROGRESS_STEPS)
            await asyncio.sleep(options.load_s / _PROGRESS_STEPS)
        progress(1.0)
        return ReplayEngine(spec, lines, revision)

    @staticmethod
    def swap_key(spec: EngineSpec) -> str | None:
        family = spec.options.get("family")
        return None if family is None else f"{family} {spec.slots} {spec.context_length} {spec.memory_bytes}"


class ReplayEngine:
    def __init__(self, spec: EngineSpec, lines: Sequence[_Line], revision: str) -> None:
        self._model = spec.model
        self._lines = lines
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(spec.context_length or CONTEXT_LENGTH, spec.slots, f"replay-1-{revision}")

    @property
    def dead(self) -> str | None:
        return self._death.result() if self._death.done() else None

    async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
        self._check(job)
        line = self._choose(job)
        pieces = line.pieces[: job.sampling.max_tokens]
        cut = len(pieces) < len(line.pieces) or line.finish == "length"
        at_once = line.delay_ms == 0 and line.fail is None
        for index, text in enumerate(pieces):
            if at_once:
                await asyncio.sleep(0)  # others have their turn
            else:
                await self._pause(line, index)
            self._check_alive()
            last = index == len(pieces) - 1 and line.fail is None
            finish: EngineFinish | None = ("length" if cut else "stop") if last else None
            yield Piece(text, (ord(text[0]) if text else 0,), finish=finish)
        if line.fail is not None:
            await self._pause(line, len(pieces))
            self._check_alive()
        if not pieces:
            yield Piece("", (0,), finish=line.finish)

    async def embed(self, job: EmbedJob) -> AsyncGenerator[Vector, None]:  # noqa: ARG002 - recorded output is text
        raise BadRequest("The replay engine makes no embeddings")
        yield array("f")

    async def swap_to(self, spec: EngineSpec) -> ReplayEngine:
        self._die("it was swapped for another model")
        return ReplayEngine(spec, *await asyncio.to_thread(_read_with_revision, spec))

    async def close(self) -> None:
        self._die("the engine was closed")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    def _check_alive(self) -> None:
        if self._death.done():
            raise EngineRestarted(self._model, self._death.result())

    def _check(self, job: Job) -> None:
        self._check_alive()
        if not job.prompt:
            raise BadRequest("The prompt is empty", param="messages")
        if any(not 0 <= token < _VOCABULARY for token in job.prompt):
            raise BadRequest("The prompt has a token that is not in the vocabulary", param="messages")
        if len(job.prompt) >= self.info.context_length:
            raise ContextLengthExceeded(self.info.context_length, len(job.prompt))
        if job.sampling.logprobs is not None:
            raise BadRequest("The replay engine has no logprobs", param="logprobs")

    def _choose(self, job: Job) -> _Line:
        prompt = "".join(map(chr, job.prompt))
        last = _HEARD.split(prompt)[-1].partition("<|end|>")[0]
        for line in self._lines:
            if (line.when is None or line.when in last) and prompt.endswith(line.behind):
                return line
        raise BadRequest("The replay script has no line for this message", param="messages")

    async def _pause(self, line: _Line, index: int) -> None:
        """Let the time before piece `index` pass, and fail there if the script says so."""
        if line.fail is not None and index >= min(line.after, len(line.pieces)):
            await self._fail(line.fail)
        await asyncio.wait({self._death}, timeout=line.delay_ms / 1000)

    async def _fail(self, how: Literal["die", "stall", "error"]) -> None:
        match how:
            case "error":
                raise EdgeError("The replay script has an error here")
            case "die":
                self._die("the replay script ends the engine here")
            case "stall":
                await asyncio.wait({self._death})


def _read(spec: EngineSpec) -> list[_Line]:
    path: Path = spec.source
    lines: list[_Line] = []
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text.strip():
                try:
                    lines.append(_Line.model_validate_json(text))
                except ValidationError as error:
                    raise LlmUnavailable(spec.model, f"{path.name} line {number}: {_short(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LlmUnavailable(spec.model, f"{path.name} cannot be read: {error}") from None
    if not lines:
        raise LlmUnavailable(spec.model, f"{path.name} has no line to play")
    return lines


def _read_with_revision(spec: EngineSpec) -> tuple[list[_Line], str]:
    return _read(spec), hashlib.sha256(spec.source.read_bytes()).hexdigest()[:8]


def _template(lines: Sequence[_Line]) -> str:
    """A chat template that opens the reasoning block for exactly the messages whose line says so."""
    think = "".join(
        f"{{%- {'elif' if index else 'if'} {_fits(line)} -%}}" + ("<think>\\n" if line.reasoning_open else "")
        for index, line in enumerate(line for line in lines if not line.behind)
    )
    return _TEMPLATE.replace("__THINK__", think.replace("\\n", "{{ '\\n' }}") + "{%- endif -%}")


def _fits(line: _Line) -> str:
    return "true" if line.when is None else f"{json.dumps(line.when, ensure_ascii=False)} in last"


def _short(error: ValidationError) -> str:
    problem: Any = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
