"""What becomes of each field of a request's body: the tables that the documentation and the parsers share.

Honoured fields are those of an API's `Body`, such as `wire.request.ChatBody`. A field in no table is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from citadel.errors import BadRequest
from citadel.messages import NamedTool, ToolSpec

WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted, since they do not change what a model here would answer."""

UNSUPPORTED: Final[dict[str, str]] = {
    "allowed_token_ids": "there is no list of allowed tokens; use logit_bias",
    "audio": "models here answer in text",
    "bad_words": "there is no list of forbidden words; use logit_bias",
    "best_of": "there is one way to sample; use n",
    "chat_template": "the template is the server's; use chat_template_kwargs",
    "documents": "put documents into the messages",
    "echo": "the prompt is not repeated",
    "function_call": "it was replaced by tool_choice",
    "functions": "it was replaced by tools",
    "guided_choice": "use response_format",
    "guided_decoding_backend": "use response_format",
    "guided_grammar": "use response_format",
    "guided_json": "use response_format",
    "guided_regex": "use response_format",
    "guided_whitespace_pattern": "use response_format",
    "length_penalty": "there is no beam search",
    "modalities": "models here answer in text",
    "prompt_logprobs": "only the answer has logprobs",
    "structured_outputs": "use response_format",
    "truncate_prompt_tokens": "shorten the messages",
    "use_beam_search": "there is no beam search",
    "web_search_options": "there is no web search",
}
"""They would change the answer, and nothing here can honour them; the text says what to do instead."""
_AS_UNSET: Final[dict[str, object]] = {"modalities": ["text"]}
"""Values that ask for what is done anyway."""


class Body(BaseModel):
    """The fields of a body that are honoured, in the order in which they are checked: the first error is told."""

    model_config = ConfigDict(extra="ignore", frozen=True)


B = TypeVar("B", bound=Body)


def checked(body: Mapping[str, Any], kind: type[B], unsupported: Mapping[str, str]) -> B:
    """Raises BadRequest: for the first of the `unsupported` that is set (null, false and empty values count as unset),
    else for the first field that is wrong."""
    for name, advice in unsupported.items():
        if (value := body.get(name)) and value != _AS_UNSET.get(name):
            raise BadRequest(f"{name}: not supported: {advice}", param=name)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _bad_field(error) from None


def needed(where: str, name: str, value: str | None) -> str:
    """The value of a field that only some kinds of the object at `where` must have."""
    if value is None:
        raise BadRequest(f"{where}.{name}: this field is required", param=f"{where}.{name}")
    return value


def tool_choice(
    mode: Literal["auto", "none", "required"], named: str | None, where: str, tools: Sequence[ToolSpec]
) -> Literal["auto", "none", "required"] | NamedTool:
    """`named`, where the choice is a tool of this name, which stands at `where`; else `mode`. Raises BadRequest."""
    if not tools and (named is not None or mode == "required"):
        raise BadRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    if named is None:
        return mode
    if all(tool.name != named for tool in tools):
        raise BadRequest(f"{where}: there is no tool {named!r}", param=where)
    return NamedTool(named)


def _bad_field(error: ValidationError) -> BadRequest:
    """The problem that is deepest in the body: of a union's, that of the variant which came closest."""
    problem = max(error.errors(include_url=False), key=lambda each: len(_path(each["loc"])))
    param = _path(problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    name = "".join(param) or None
    return BadRequest(f"{name}: {message[0].lower()}{message[1:]}", param=name)


def _path(location: tuple[int | str, ...]) -> list[str]:
    """`("messages", 0, "content", "list[_Part]", 1, "type")` -> `messages[0].content[1].type`, in parts."""
    parts: list[str] = []
    for step in location:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isidentifier() and not step.startswith("_") and step not in ("str", "int", "float", "bool"):
            parts.append(f".{step}" if parts else step)
    return parts
