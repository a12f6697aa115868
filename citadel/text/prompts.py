"""A request -> all that an engine and a reader need of it: the prompt, how to read the output, and its grammar."""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Final

from citadel.engine import Tokenizer
from citadel.messages import ChatRequest, NamedTool
from citadel.text import prompts_deepseek, template
from citadel.text.formats import FORMATS, Format, Thinking, tool_call_id
from citadel.text.grammar import Grammar, compile_grammar
from citadel.text.reader import Reading
from citadel.text.tools_in_words import renders_tools

_GRAMMARS: Final = 128
"""How many grammars are kept, of all models together."""
_TOLD: Final = 1024
_AS_IT_IS: Final = Format("raw", ())
"""A prompt without a conversation is continued by text and nothing else."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokenizer` is the one that made it."""

    token_ids: list[int]
    reading: Reading
    tokenizer: Tokenizer
    thinking: tuple[Thinking, ...]
    """With which markers the model may open reasoning by itself."""
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Spoken:
    """A format as one model speaks it. `marker_ids` of those of its markers that are one token to its tokenizer."""

    format: Format
    tokenizer: Tokenizer
    marker_ids: Mapping[str, int]


def spoken(fmt: Format, tokenizer: Tokenizer) -> Spoken:
    token_id = token_id_in(tokenizer)
    markers = {marker for each in fmt.thinking for marker in (each.open.strip(), each.close)}
    return Spoken(fmt, tokenizer, {marker: id_ for marker in markers if (id_ := token_id(marker)) is not None})


def make(request: ChatRequest, chat_template: str | None, model: Spoken) -> Prompt:
    """Renders and tokenizes. The first call takes longer, for it imports what renders."""
    fmt, tokenizer, ids = model.format, model.tokenizer, model.marker_ids
    if request.prompt is not None:
        return _raw(request, request.prompt, tokenizer)
    source = chat_template or template.FALLBACK
    thinks = request.template_kwargs.get("enable_thinking") is not False
    text = _text(request, tokenizer, chat_template, fmt, thinks=thinks)
    reading = Reading(
        format=fmt,
        tools=() if request.tool_choice == "none" else request.tools,
        in_reasoning=any(template.opens_reasoning(text, each.open) for each in fmt.thinking),
        stops=request.stop,
        call_is_the_answer=isinstance(request.tool_choice, NamedTool),
        reasoning_end_ids=frozenset(ids[each.close] for each in fmt.thinking if each.close in ids),
        new_id=lambda: tool_call_id(fmt.id_style, secrets.randbits(64)),
    )
    return Prompt(tokenizer.encode(text), reading, tokenizer, _opens_itself(model, source, thinks=thinks))


def _raw(request: ChatRequest, prompt: str | tuple[int, ...], tokenizer: Tokenizer) -> Prompt:
    reading = Reading(
        format=_AS_IT_IS,
        tools=(),
        in_reasoning=False,
        stops=request.stop,
        call_is_the_answer=False,
        reasoning_end_ids=frozenset(),
        new_id=str,
    )
    return Prompt(tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), reading, tokenizer, ())


def _opens_itself(model: Spoken, source: str, *, thinks: bool) -> tuple[Thinking, ...]:
    """The markers that the model knows: its template mentions them, or they are tokens."""
    thinking = model.format.thinking
    if model.format.channels or not thinks:
        return thinking if model.format.channels else ()
    return tuple(one for one in thinking if (marker := one.open.strip()) in source or marker in model.marker_ids)


def _text(request: ChatRequest, tokenizer: Tokenizer, chat_template: str | None, fmt: Format, *, thinks: bool) -> str:
    """By the model's template; for families that publish none, by the prompt we write for them."""
    if chat_template is not None or fmt.name not in prompts_deepseek.WRITTEN_HERE:
        return template.render(request, chat_template, tokenizer.special_tokens)
    effort = request.template_kwargs.get("reasoning_effort")
    continues = request.continue_final_message
    arguments = fmt.name, request.messages, request.tools
    return prompts_deepseek.render(*arguments, thinking=thinks, effort=effort, continues=continues)


def with_calls(fmt: Format, chat_template: str | None) -> Format:
    """The format for a request with tools: where the model has no notation for calls that we know, they get Hermes'."""
    if chat_template is None and fmt.name in prompts_deepseek.WRITTEN_HERE:
        return fmt
    if renders_tools(chat_template or template.FALLBACK) and (fmt.frames or fmt.channels):
        return fmt
    return replace(FORMATS["hermes"], thinking=fmt.thinking)


def token_id_in(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    """Finds the id of a text that is one token."""

    @lru_cache(maxsize=256)
    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text)
        return ids[0] if len(ids) == 1 else None

    return token_id


Key = tuple[str, str]


def grammar_key(request: ChatRequest, prompt: Prompt) -> Key | None:
    """All that the grammar depends on: the tools, and the rest; None where the output is free."""
    if not request.tools and request.response_format is None:
        return None
    asked = _choice(request), request.parallel_tool_calls, request.response_format
    opened = prompt.reading.in_reasoning, [each.open for each in prompt.thinking]
    rest = [request.model, prompt.reading.format.name, *asked, *opened]
    return json.dumps([asdict(tool) for tool in request.tools]), json.dumps(rest)


def compile_for(request: ChatRequest, prompt: Prompt, tokenizer: Tokenizer) -> Grammar | None:
    """Blocks, for a large schema up to seconds: call in a thread."""
    return compile_grammar(
        request,
        prompt.reading.format,
        in_reasoning=prompt.reading.in_reasoning,
        token_id=token_id_in(tokenizer),
        thinking=prompt.thinking,
    )


class Grammars:
    """Grammars by their keys, the least recently used forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Grammar | None] = OrderedDict()
        self._told: OrderedDict[tuple[int, str], None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __getitem__(self, key: Key) -> Grammar | None:
        self._known.move_to_end(key)
        return self._known[key]

    def keep(self, key: Key, grammar: Grammar | None) -> list[str]:
        """Returns the keywords that it does not enforce, once for the same tools."""
        self._known[key] = grammar
        found = [(hash(key[0]), path) for path in (grammar.left_out if grammar else ())]
        new = [each for each in found if each not in self._told]
        self._told.update(dict.fromkeys(new))
        for kept, limit in ((self._known, _GRAMMARS), (self._told, _TOLD)):
            while len(kept) > limit:
                kept.popitem(last=False)
        return [path for _, path in new]


def _choice(request: ChatRequest) -> list[str]:
    choice = request.tool_choice
    return ["named", choice.name] if isinstance(choice, NamedTool) else [choice]
