"""What becomes of each field of a chat request's body: the table that the documentation and the parser share.

Honoured fields are those of `wire.request.ChatBody`. A field in no table is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from citadel.errors import BadRequest

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
    "prompt_logprobs": "only the answer has logprobs",
    "structured_outputs": "use response_format",
    "truncate_prompt_tokens": "shorten the messages",
    "use_beam_search": "there is no beam search",
    "web_search_options": "there is no web search",
}
"""They would change the answer, and nothing here can honour them; the text says what to do instead."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises BadRequest for the first unsupported field that is set; null, false and empty values count as unset."""
    for name, advice in UNSUPPORTED.items():
        if body.get(name):
            raise BadRequest(f"{name}: not supported: {advice}", param=name)
    if body.get("modalities") not in (None, [], ["text"]):
        raise BadRequest("modalities: not supported: models here answer in text", param="modalities")
