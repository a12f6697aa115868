"""`POST /v1/embeddings`: OpenAI's body -> an `EmbedRequest`, and vectors -> the answer."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from citadel import errors
from citadel.errors import BadRequest, CitadelError
from citadel.messages import CallEvent, Done, Embedded, EmbedRequest, Usage
from citadel.wire.dialect import Json, Sse
from citadel.wire.fields import Body, checked
from citadel.wire.sampling import TokenIds

MAX_INPUTS: Final = 2048
_UNSUPPORTED: Final = {
    "add_special_tokens": "send token ids to choose them yourself",
    "dimensions": "vectors have the size that the model makes",
    "messages": "send texts as input",
    "truncate_prompt_tokens": "shorten the input",
}


class EmbeddingBody(Body):
    """The fields that are honoured."""

    input: str | TokenIds | list[str] | list[TokenIds]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None


def embedding_request(body: Mapping[str, Any], model: str, requested_model: str) -> EmbedRequest:
    """`model` as for `chat_request`. Raises BadRequest."""
    asked = checked(body, EmbeddingBody, _UNSUPPORTED)
    inputs = _inputs(asked.input)
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"input: at most {MAX_INPUTS} texts a call, not {len(inputs)}", param="input")
    for index, one in enumerate(inputs):
        if not one:
            raise BadRequest(f"input[{index}]: it is empty", param=f"input[{index}]")
    return EmbedRequest(model, requested_model, inputs, as_base64=asked.encoding_format == "base64")


def _inputs(given: str | list[int] | list[str] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """The texts. A list of numbers is one text; an empty list is none."""
    if isinstance(given, str):
        return (given,)
    if not given:
        raise BadRequest("input: it is empty", param="input")
    numbers = tuple(each for each in given if isinstance(each, int))
    return (numbers,) if numbers else tuple(each if isinstance(each, str) else tuple(each) for each in given)  # type: ignore[misc]


class EmbeddingAnswer:
    """Embeddings, as a `Dialect`. There is nothing to stream."""

    ends_with_done: ClassVar[bool] = True
    pings: ClassVar[Sse | None] = None

    def __init__(self, request: EmbedRequest) -> None:
        self._request = request

    def stream(self, event: CallEvent) -> Iterator[Sse]:  # noqa: ARG002 - see above
        return iter(())

    def failed(self, error: CitadelError) -> list[Sse]:
        return [(None, errors.openai_body(error, in_stream=True))]

    def whole(self, events: Iterable[CallEvent]) -> Json:
        vectors: list[array[float]] = []
        total = Usage()
        for event in events:
            if isinstance(event, Embedded):
                vectors.append(event.vector)
            elif isinstance(event, Done):
                total = event.usage
        data = [{"object": "embedding", "index": at, "embedding": self._said(one)} for at, one in enumerate(vectors)]
        counts = {"prompt_tokens": total.prompt, "total_tokens": total.prompt}
        return {"object": "list", "data": data, "model": self._request.requested_model, "usage": counts}

    def _said(self, vector: array[float]) -> list[float] | str:
        """As numbers, or as the base64 text of 32-bit numbers, the lowest byte first."""
        if not self._request.as_base64:
            return vector.tolist()
        if sys.byteorder == "big":
            vector = array("f", vector)
            vector.byteswap()
        return base64.b64encode(vector.tobytes()).decode()
