"""The port: what an engine adapter must provide, in words; tests/engines/test_contract.py has a test per sentence.

**An adapter** (a class in `engines/`, found by name in `engines.CATALOGUE`) has three static doors:
- `need(spec)` says, from the files alone, what memory a load will take. It blocks; it is called in a thread.
  An engine that can do with less places its weights within `spec.room`; one that can't says what it needs.
- `open_tokenizer(spec)` reads the tokenizer without the weights. It blocks; it is called in a thread.
- `load(spec, progress)` returns an `Engine` that is ready to generate. It never blocks the event loop.
  `progress` is told the fraction that is loaded, from 0.0 to 1.0, never falling, from any thread.
  A load that fails or is cancelled leaves nothing behind: no process, thread or memory. A failure is `LlmUnavailable`.

**An engine** is one loaded model. It does what `spec.task` says, and refuses the other with a `BadRequest`.
- `generate(job)` yields pieces: the text of each is new, and joined they are the output, special tokens included
  but for the one that ended it. Every token of the output is in exactly one piece's `token_ids`; a piece may hold
  several tokens, or tokens and no text yet.
- The last piece, and only it, has `finish`: `length` when `max_tokens` or the context ended the output, else `stop`.
- It makes at most `max_tokens` tokens, the one that ended it (end of sequence, a stop token) included.
- Up to `info.slots` jobs run at once, are decoded together, and never see each other's text. The caller keeps to
  that number.
- Closing the generator (or cancelling its consumer) stops the work: when `aclose()` returns, the engine does nothing
  more for that job and its slot is free.
- A consumer that does not take its pieces holds up nobody else.
- A job that cannot be run as asked (a prompt that is empty or too long, a token out of the vocabulary, a setting the
  engine does not have) is a `BadRequest`, before the first piece; the engine and all other jobs go on.
- The same job with the same seed, or with temperature 0, gives the same output when it runs alone on the same state
  of the prefix cache.
- `cached_tokens` counts the prompt tokens that an earlier job left computed.
- `logprobs` has an entry per token when the job asked for them, from the model's own distribution.
- When the engine dies, each running and each later job raises `EngineRestarted`, and `dead` gives the reason; it
  stays None while the engine lives.
- `embed(job)` yields the vector of each text in the order of the job's, of unit length. What is said above of a job's
  slot, its closing, its refusal, its determinism and the engine's death holds for it too; a text may fill the whole
  context.
- `close()` ends running jobs as a death does, gives all memory back, and leaves no thread and no child process. It
  may be called twice.
- An engine raises only errors of `citadel.errors`.

**Swapping in place** is what an adapter and its engines may be able to do besides (`SwapAdapter`, `SwapEngine`).
- `swap_key(spec)` of the adapter says, from the files alone, which models can take over each other's engine: those
  with the same key. None is for a model that can't. It blocks; it is called in a thread.
- `swap_to(spec)` makes an engine on which no job runs that of another model with the same key, and returns it: it
  answers as one that was loaded, and nothing of the old model is in it.
- The old engine is dead from the call on. Closing it after a swap does nothing; after a swap that raised or was
  cancelled it must be closed, as any dead one. A swap that can't be done, or that failed, is `LlmUnavailable`.

**A tokenizer** is independent of the engine and outlives it; its methods may be called from any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from citadel.messages import TokenLogprob, made_per_piece

Mode = Literal["batch", "single"]
Task = Literal["generate", "embed"]
EngineFinish = Literal["stop", "length"]
Progress = Callable[[float], None]
Vector: TypeAlias = "array[float]"
"""Of type code `f`: 32-bit numbers."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a load takes, in bytes. `fitted`: with more room, or less, it would be another."""

    ram: int = 0
    gpu: int = 0
    fitted: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an adapter needs to load one model.

    `source` is a file or folder on this disk. `context_length` counts prompt and output tokens of one job; None
    means the model's own. `memory_bytes` is the owner's figure for the whole load; None means the adapter's estimate.
    `options` is the engine's own table of models.toml, passed through. `cache_dir` is where derived files may be kept,
    `data_dir` where what is not to be lost is; None means nowhere. `room` is what the load may count on, when models
    that may go have gone; None means all that the machine has.
    """

    model: str
    source: Path
    mode: Mode | None
    slots: int
    context_length: int | None
    memory_bytes: int | None
    cache_dir: Path
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data_dir: Path | None = None
    room: Need | None = None
    task: Task = "generate"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine put a model's weights: bytes by tier, `gpu`, `ram` and `disk`.

    `found` is None where it could not be read back after the load; `elsewhere` names tensors that are not where they
    were planned. `tokens_per_s` is predicted for one sequence.
    """

    planned: Mapping[str, int]
    found: Mapping[str, int] | None
    elsewhere: tuple[str, ...]
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once a model is loaded.

    `fingerprint` is `ENGINE-VERSION-REVISION`. `sampling_defaults` are the checkpoint's own, by the names of
    `Sampling`. `placement` is None for an engine that does not place weights.
    """

    context_length: int
    slots: int
    fingerprint: str
    sampling_defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; every value is set. Temperature 0 is greedy, `top_k` 0 is no limit.

    The penalties are OpenAI's (presence, frequency: over the output) and vLLM's (repetition: over prompt and output).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One generation. `id` is unique in the process. `grammar` is llguidance Lark over the whole output, or None."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """Texts to make a vector of each, as tokens. `id` is unique in the process."""

    id: str
    texts: Sequence[Sequence[int]]


@made_per_piece
class Piece:
    """What came out since the piece before. `cached_tokens` is the same on every piece of a job."""

    text: str
    token_ids: tuple[int, ...]
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: EngineFinish | None = None


class Tokenizer(Protocol):
    @property
    def chat_template(self) -> str | None:
        """The Jinja source that the weights carry."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of `bos_token`, `eos_token` and their like, for the template."""
        ...

    @property
    def context_length(self) -> int | None:
        """Tokens the model was made for; None where the files do not say."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        ...

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids. Texts of special tokens become those tokens.

        Nothing is added, but with `add_special` the tokens that the files put around a text that is read as a whole.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens included; a byte sequence that is no UTF-8 becomes U+FFFD."""
        ...


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    @property
    def dead(self) -> str | None:
        """Why the engine can generate no more; None while it can."""
        ...

    def generate(self, job: Job) -> AsyncGenerator[Piece, None]: ...

    def embed(self, job: EmbedJob) -> AsyncGenerator[Vector, None]: ...

    async def close(self) -> None: ...


class Adapter(Protocol):
    @staticmethod
    def need(spec: EngineSpec) -> Need: ...

    @staticmethod
    def open_tokenizer(spec: EngineSpec) -> Tokenizer: ...

    @staticmethod
    async def load(spec: EngineSpec, progress: Progress) -> Engine: ...


@runtime_checkable
class SwapAdapter(Protocol):
    @staticmethod
    def swap_key(spec: EngineSpec) -> str | None: ...


@runtime_checkable
class SwapEngine(Engine, Protocol):
    async def swap_to(self, spec: EngineSpec) -> Engine: ...
