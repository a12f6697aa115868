"""`POST /v1/completions`: a prompt of text or token ids, continued as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, cast

import orjson
from pydantic import Field, StrictBool, StrictInt

from citadel import errors
from citadel.errors import BadRequest, CitadelError
from citadel.messages import (
    CallEvent,
    ChatRequest,
    Content,
    Delta,
    Done,
    Embedded,
    Finished,
    Started,
    TokenLogprob,
    Usage,
    Waiting,
)
from citadel.wire.dialect import Json, Sse
from citadel.wire.fields import UNSUPPORTED, Body, checked
from citadel.wire.response import TEXT, Answering, around, usage
from citadel.wire.sampling import MAX_TOP_LOGPROBS, SamplingBody, StreamOptions, TokenIds, sampling, stops

DEFAULT_MAX_TOKENS: Final = 16
_UNSUPPORTED: Final = {
    **{name: advice for name, advice in UNSUPPORTED.items() if name not in ("echo", "best_of")},
    "response_format": "use chat completions",
    "suffix": "models here continue a text, they do not fill gaps",
    "prompt_embeds": "send the prompt as text or token ids",
    "add_special_tokens": "write them into the prompt",
}


class _Continued(Body):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    model: str | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    echo: StrictBool | None = None


class CompletionBody(SamplingBody, _Continued):
    """The fields that are honoured."""

    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def completion_request(body: Mapping[str, Any], model: str, requested_model: str) -> ChatRequest:
    """`model` as for `chat_request`. Raises BadRequest."""
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise BadRequest(f"best_of: not supported: {UNSUPPORTED['best_of']}", param="best_of")
    asked = checked(body, CompletionBody, _UNSUPPORTED)
    prompt = _one(asked.prompt)
    if asked.echo and not isinstance(prompt, str):
        raise BadRequest("echo: only a prompt of text is repeated", param="echo")
    if asked.echo and asked.logprobs is not None:
        raise BadRequest("echo: the prompt has no logprobs; ask for one of the two", param="echo")
    return ChatRequest(
        model=model,
        requested_model=requested_model,
        messages=(),
        prompt=prompt,
        echo=bool(asked.echo),
        sampling=sampling(asked, asked.max_tokens or DEFAULT_MAX_TOKENS, asked.logprobs),
        stop=stops(asked.stop),
        n=asked.n or 1,
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        continuous_usage_stats=bool(asked.stream_options and asked.stream_options.continuous_usage_stats),
    )


def _one(prompt: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    """The prompt, alone or as the only one of a list."""
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise BadRequest("prompt: it is empty", param="prompt")
    if isinstance(first := prompt[0], int):
        return tuple(token for token in prompt if isinstance(token, int))
    if len(prompt) > 1:
        raise BadRequest("prompt: one prompt a call, several calls at once", param="prompt")
    return first if isinstance(first, str) else tuple(first)


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list[str])
    length: int = 0
    logprobs: Json | None = None
    reason: str | None = None


class CompletionAnswer:
    """Completions, as a `Dialect`."""

    ends_with_done: ClassVar[bool] = True
    pings: ClassVar[Sse | None] = None

    def __init__(self, answering: Answering, request: ChatRequest) -> None:
        self._answering = answering
        self._echo = request.prompt if request.echo and isinstance(request.prompt, str) else ""
        self._logprobs = request.sampling.logprobs is not None
        self._fingerprint = ""
        self._choices = [_Choice() for _ in range(request.n)]
        self._written: dict[int, list[bytes]] = {}
        """As of chat: the chunks of a choice, written once and cut where the text goes."""

    def stream(self, event: CallEvent) -> Iterable[Sse] | bytes:
        plain = not (self._logprobs or self._answering.continuous_usage)
        if plain and isinstance(event, Delta) and isinstance(said := event.event, Content):
            return orjson.dumps(said.text).join(self._around(event.choice))
        return [(None, chunk) for chunk in self._chunks(event)]

    def _around(self, choice: int) -> list[bytes]:
        parts = self._written.get(choice)
        if parts is None:
            parts = self._written[choice] = around(self._chunk(choice, TEXT, None, None, Usage()))
        return parts

    def _chunks(self, event: CallEvent) -> Iterator[Json]:
        match event:
            case Started():
                self._fingerprint = event.fingerprint
                if self._echo:
                    for choice in range(len(self._choices)):
                        yield self._chunk(choice, self._echo, None, None, event.usage)
            case Delta(choice=choice, event=Content() as said):
                yield self._chunk(choice, said.text, self._said(choice, said.logprobs), None, event.usage)
            case Delta(choice=choice, event=Finished() as finished):
                yield self._chunk(choice, "", None, finished.reason, event.usage)
            case Done() if self._answering.include_usage:
                yield {**self._envelope([]), "usage": usage(event.usage)}
            case Done() | Waiting() | Delta() | Embedded():
                return

    def failed(self, error: CitadelError) -> list[Sse]:
        return [(None, errors.openai_body(error, in_stream=True))]

    def whole(self, events: Iterable[CallEvent]) -> Json:
        total = Usage()
        for event in events:
            for part in self._parts(event):
                index: int = part["index"]
                _add(self._choices[index], part)
            if isinstance(event, Done):
                total = event.usage
        answers: list[Json] = [
            {"index": index, "text": "".join(one.text), "logprobs": one.logprobs, "finish_reason": one.reason}
            for index, one in enumerate(self._choices)
        ]
        return {**self._envelope(answers), "usage": usage(total)}

    def _parts(self, event: CallEvent) -> list[Json]:
        return [part for chunk in self._chunks(event) for part in cast("list[Json]", chunk["choices"])]

    def _said(self, choice: int, logprobs: tuple[TokenLogprob, ...]) -> Json | None:
        """The legacy shape: lists side by side, `text_offset` in characters of this choice's text."""
        if not self._logprobs:
            return None
        texts = [_text(one) for one in logprobs]
        start = self._choices[choice].length
        offsets = [start + sum(map(len, texts[:index])) for index in range(len(texts))]
        self._choices[choice].length = start + sum(map(len, texts))
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{_text(each): each.logprob for each in (*one.top, one)} for one in logprobs],
            "text_offset": offsets,
        }

    def _chunk(self, choice: int, text: str, logprobs: Json | None, reason: str | None, so_far: Usage) -> Json:
        part: Json = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._envelope([part])
        if self._answering.include_usage:
            chunk["usage"] = usage(so_far) if self._answering.continuous_usage else None
        return chunk

    def _envelope(self, choices: list[Json]) -> Json:
        return self._answering.envelope("text_completion", self._fingerprint, choices)


def _add(into: _Choice, part: Json) -> None:
    into.text.append(part["text"])
    into.reason = part["finish_reason"] or into.reason
    if part["logprobs"] is not None:
        into.logprobs = into.logprobs or {name: [] for name in part["logprobs"]}
        for name, values in part["logprobs"].items():
            into.logprobs[name] += values


def _text(token: TokenLogprob) -> str:
    return token.text.decode("utf-8", errors="replace")
