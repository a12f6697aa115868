"""Dialogues in the tiny language, seeded: for training the test model, and for examining it.

A dialogue is in the server's own words, and its text is what the server's renderer makes of it: the model is trained
on exactly the prompts that it will see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final

from citadel.messages import ChatRequest, Message, ToolCall, ToolSpec
from citadel.text.template import render

from .language import NO_TOOL, TOOLS, WITH_TOOLS, WITHOUT_TOOLS, Call, Maker, Request, name

TEMPLATE: Final = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")
END: Final = "<|im_end|>"

_HELD_OUT: Final = 16
"""One dialogue in so many is kept from training."""
_MOST_TOOLS: Final = 5
_MOST_CHARACTERS: Final = 1600
"""Of an unseen dialogue: training has none of over 512 tokens."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The last message is the assistant's. An answer without reasoning was given with thinking off."""

    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]

    def answers(self) -> list[int]:
        """Where the assistant speaks."""
        return [at for at, message in enumerate(self.messages) if message.role == "assistant"]

    def request(self, answer: int) -> ChatRequest:
        """What a client sends to get this answer."""
        thinking = self.messages[answer].reasoning is not None
        kwargs = {"enable_thinking": thinking}
        return ChatRequest("tiny", "tiny", self.messages[:answer], self.tools, template_kwargs=kwargs)

    def body(self, answer: int) -> dict[str, Any]:
        """The same for `POST /v1/chat/completions`, without the model."""
        request = self.request(answer)
        body: dict[str, Any] = {"messages": [_on_the_wire(message) for message in request.messages], "temperature": 0}
        if request.tools:
            body["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
        return body | {"chat_template_kwargs": request.template_kwargs}

    def prompt(self, answer: int) -> str:
        return render(self.request(answer), TEMPLATE, {})

    def output(self, answer: int) -> str:
        """What the model must write after `prompt`, without the token that ends it."""
        return self.text(answer + 1).removeprefix(self.prompt(answer)).removesuffix(f"{END}\n")

    def text(self, until: int | None = None) -> str:
        """The messages before `until` as a later prompt shows them."""
        later = (*self.messages[:until], Message("user", "?"))
        return render(ChatRequest("tiny", "tiny", later, self.tools), TEMPLATE, {}).rpartition("<|im_start|>user\n")[0]


def _on_the_wire(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content, "reasoning": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _function(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def training(seed: int, wanted: Callable[[Dialogue], bool] = lambda _: True) -> Iterator[Dialogue]:
    """Without end, those that are `wanted`."""
    return (one for one in _all(Random(seed)) if wanted(one) and not _held_out(one))


def unseen(count: int, seed: int = 0) -> list[Dialogue]:
    """Different dialogues that are in no training, whatever its seed."""
    found: dict[str, Dialogue] = {}
    for one in _all(Random(seed)):
        if _held_out(one) and len(text := one.text()) <= _MOST_CHARACTERS:
            found[text] = one
        if len(found) == count:
            break
    return list(found.values())


def _held_out(one: Dialogue) -> bool:
    return int.from_bytes(sha256(one.text().encode()).digest()[:4]) % _HELD_OUT == 0


def _all(rng: Random) -> Iterator[Dialogue]:
    while True:
        yield dialogue(rng)


# A dialogue: some turns, in each the user asks for something, then calls, results, and an answer in words.


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the user asks at once. `fits`: what it takes is offered."""

    requests: Sequence[Request]
    fits: bool = True

    def tools(self) -> set[str]:
        return {call.tool for request in self.requests for call in request.calls}


def dialogue(rng: Random) -> Dialogue:
    system, turns = _turns(rng)
    needed = {tool for turn in turns if turn.fits for tool in turn.tools()}
    turns = [turn for turn in turns if turn.fits or not turn.tools() & needed]
    refused = {tool for turn in turns if not turn.fits for tool in turn.tools()}
    told = [message for turn in turns for message in _played(turn)]
    thinks = rng.choice((0.0, 1.0, 1.0, 0.5))
    told = [message if rng.random() < thinks else replace(message, reasoning=None) for message in told]
    return Dialogue(_offered(rng, needed, refused), (*system, *told))


def _turns(rng: Random) -> tuple[list[Message], list[_Turn]]:
    myself, system = "a tiny model", list[Message]()
    if rng.random() < 0.2:
        myself = name(rng)
        system = [Message("system", f"You are {myself}.")]
    tool_less = rng.random() < 0.1
    turns = [_turn(rng, myself, may_fit=not tool_less) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    greeted = [request.answer for turn in turns for request in turn.requests if request.answer.startswith("Hello")]
    if greeted and rng.random() < 0.5:
        who = greeted[-1].removeprefix("Hello ")
        turns.append(_Turn([Request("What is my name?", f"Your name is {who}")]))
    return system, turns


def _turn(rng: Random, myself: str, *, may_fit: bool) -> _Turn:
    kind = rng.random()
    if kind < 0.05:
        return _Turn([Request("Who are you?", f"I am {myself}.")])
    if kind < 0.25:
        return _Turn([_made(rng, WITHOUT_TOOLS)])
    if kind < 0.4:
        return _Turn([_made(rng, WITH_TOOLS)], fits=False)
    return _Turn([_made(rng, WITH_TOOLS) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3)))], fits=may_fit)


def _made(rng: Random, makers: Mapping[Maker, int]) -> Request:
    return rng.choices(list(makers), list(makers.values()))[0](rng)


def _offered(rng: Random, needed: set[str], refused: set[str]) -> tuple[ToolSpec, ...]:
    others = sorted(TOOLS.keys() - needed - refused)
    more = rng.randint(0, max(0, _MOST_TOOLS - len(needed))) if needed or rng.random() < 0.7 else 0
    names = [*sorted(needed), *rng.sample(others, min(more, len(others)))]
    rng.shuffle(names)
    return tuple(TOOLS[each] for each in names)


def _played(turn: _Turn) -> Iterator[Message]:
    yield Message("user", " ".join(request.ask for request in turn.requests))
    if not turn.fits:
        yield Message("assistant", NO_TOOL, "No tool fits.")
        return
    known: list[Call] = []
    for calls in _rounds(turn.requests):
        made = tuple(ToolCall(f"call-{at}", call.tool, json.dumps(call.arguments)) for at, call in enumerate(calls))
        yield Message("assistant", None, _thought(known, calls), made)
        for call, result in zip(made, calls, strict=True):
            yield Message("tool", result.result, tool_call_id=call.id)
        known = calls
    yield Message("assistant", " ".join(request.answer for request in turn.requests), _thought(known, []))


def _rounds(requests: Sequence[Request]) -> Iterator[list[Call]]:
    """The calls to make at once: the first of each request, then the second of those that take two."""
    for calls in zip_longest(*(request.calls for request in requests)):
        yield [call for call in calls if call is not None]


def _thought(known: Sequence[Call], calls: Sequence[Call]) -> str:
    parts = [f"I know: {'; '.join(call.result for call in known)}."] if known else []
    parts += [f"I call {call.tool}{': ' if call.arguments else ''}{_values(call.arguments)}." for call in calls]
    return " ".join(parts) or "I need no tool."


def _values(arguments: Mapping[str, Any]) -> str:
    return ", ".join(value if isinstance(value, str) else json.dumps(value) for value in arguments.values())
