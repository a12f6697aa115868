"""Runs a chat template: Jinja in a sandbox, with the few names that templates of Hugging Face's models count on.

The same text as transformers makes comes out, without importing it (`tests/text/test_jinja.py` renders every template
at hand with both); a template is somebody's program, so it sees no more than what is passed to it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TEMPLATES: Final = 64
"""How many are kept compiled, which takes longer than to render them."""
_MARK: Final = "@@the-answer-goes-on-here@@"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` says which part of a text a model is trained on: here just that part."""

    tags = {"generation"}  # noqa: RUF012 - that is how Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render(source: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """The text of the template for `messages`; `values` are its other names. Raises whatever the template does."""
    return compiled(source).render(messages=messages, **values)


def render_open(source: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content, for the model to go on with.

    Where that is, a mark tells which is put there. A template that strips the content strips the mark's space, too.
    """
    *before, last = messages
    content = last.get("content")
    if content is None:
        raise ValueError("the final message has no content to continue")
    text = render(source, [*before, {**last, "content": f"{content}{_MARK} "}], values)
    at = text.rfind(_MARK)
    if at < 0 or content.strip() not in text:
        raise ValueError("the final message can't be continued, for it does not appear in the prompt as it is")
    stripped = not text.startswith(" ", at + len(_MARK))
    return text[:at].rstrip() if stripped else text[:at]


@lru_cache(_TEMPLATES)
def compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=(_Generation, loopcontrols)
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what is special in HTML, which prompts are not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """By the clock of the machine, as templates expect."""
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - the local time is what is asked for
