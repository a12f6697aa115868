"""Our vocabulary: what a caller asks, and what a model answers, without JSON, markers or engine types.

A `ChatRequest` is what wire/ makes of a body. Events are what text/ makes of an engine's output; wire/ turns them
into chunks, or folds them into one answer. Nothing here does anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

T = TypeVar("T")

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass_transform(frozen_default=True)
def made_per_piece(cls: type[T]) -> type[T]:
    """A frozen dataclass, but only to the type checker: one that enforces it takes three times as long to make."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the conversation's history; `arguments` is JSON text, as the client sent it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function the model may call. `parameters` is a JSON Schema object; `strict` asks that it be enforced."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The `tool_choice` that asks for a call of this function."""

    name: str


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What the body says of sampling; None means the model's own default applies."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none wanted. N: the chosen token's, and N alternatives."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call, valid as far as its body can tell.

    `model` is the configured id, `requested_model` what the caller wrote (an alias is echoed). With `prompt`, text or
    token ids, there is no conversation: it is continued as it is, and what comes is not read for reasoning or calls.
    `echo`: the answer begins with the prompt.
    """

    model: str
    requested_model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    continue_final_message: bool = False
    prompt: str | tuple[int, ...] | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A call for the vector of each input, text or token ids; it takes one slot, and is answered whole.

    `as_base64`: the vectors are told as their bytes, not as numbers.
    """

    model: str
    requested_model: str
    inputs: tuple[str | tuple[int, ...], ...]
    as_base64: bool = False
    n: ClassVar[int] = 1
    stream: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural-log probability under the model, before any bias, penalty or truncation.

    `text` is the token's bytes (it may end inside a character); `top` holds the most likely alternatives, best
    first, without alternatives of their own.
    """

    token_id: int
    text: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@made_per_piece
class Reasoning:
    """`end`: how many characters of the model's raw output are decided once this has been said."""

    text: str
    end: int = 0


@made_per_piece
class Content:
    """`end` as in `Reasoning`."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    end: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """`stop_sequence`: the stop string that ended the output, where one did."""

    reason: FinishReason
    stop_sequence: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The call is not being answered yet. `position`: how many are ahead, where there is a queue."""

    kind: Literal["loading", "queued", "slot"]
    model: str
    position: int = 0


@made_per_piece
class Usage:
    """Tokens as the engine counted them; `cached` are prompt tokens that it had no need to compute."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


TextEvent = Reasoning | Content | ToolCallStarted | ToolCallArguments | ToolCallEnded | Finished


@made_per_piece
class Delta:
    """An event of one of the `n` choices, with the call's usage so far."""

    choice: int
    event: TextEvent
    usage: Usage


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has begun; `fingerprint` names its build and the model's revision. `usage` is the prompt's."""

    fingerprint: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class Done:
    usage: Usage


@dataclass(frozen=True, slots=True)
class Embedded:
    """The next input's vector, of 32-bit numbers, with the call's usage so far."""

    vector: array[float]
    usage: Usage


AnswerEvent = Started | Delta | Embedded | Done
CallEvent = Waiting | AnswerEvent
