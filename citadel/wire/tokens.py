"""The bodies of `/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from citadel.errors import BadRequest
from citadel.messages import ChatRequest
from citadel.wire.fields import Body, checked
from citadel.wire.request import chat_request


class _TokenizeBody(Body):
    prompt: str | None = None
    return_token_strs: StrictBool | None = None
    add_special_tokens: StrictBool | None = None


class DetokenizeBody(Body):
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """`request` is a conversation, or a prompt as it is."""

    request: ChatRequest
    token_texts: bool


@dataclass(frozen=True, slots=True)
class Detokenize:
    model: str
    tokens: list[int]


def tokenize_request(body: Mapping[str, Any], model: str, requested_model: str) -> Tokenize:
    """Either `prompt` or the fields of a chat request. Raises BadRequest."""
    asked = checked(body, _TokenizeBody, {})
    if asked.prompt is None:
        return Tokenize(chat_request(body, model, requested_model), bool(asked.return_token_strs))
    if body.get("messages"):
        raise BadRequest("prompt: there are messages, too; send one of the two", param="prompt")
    if asked.add_special_tokens:
        message = "add_special_tokens: not supported: write them into the prompt"
        raise BadRequest(message, param="add_special_tokens")
    request = ChatRequest(model, requested_model, messages=(), prompt=asked.prompt)
    return Tokenize(request, bool(asked.return_token_strs))


def detokenize_request(body: Mapping[str, Any], model: str, requested_model: str) -> Detokenize:  # noqa: ARG001
    return Detokenize(model, checked(body, DetokenizeBody, {}).tokens)
