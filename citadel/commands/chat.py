"""`citadel chat`: talk with a model of a running server in the terminal, or ask it one thing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from citadel.commands.client import NOT_THERE, Client, Refused, connected, has_key, not_there
from citadel.commands.common import FAILED, STOPPED, USAGE_ERROR

Json = dict[str, Any]

_HELP: Final = "/new begins anew, /model NAME changes the model, Ctrl-C stops an answer, Ctrl-D ends."
_UNPRINTABLE: Final = {code: None for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@dataclass(slots=True)
class Answer:
    """What the chunks of a stream have said so far."""

    model: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list[Json])
    finish_reason: str | None = None
    usage: Json | None = None

    def take(self, chunk: Json) -> tuple[str, str]:
        """Adds a chunk; returns what it brought of reasoning and of content."""
        self.model = chunk.get("model") or self.model
        self.usage = chunk.get("usage") or self.usage
        if not chunk.get("choices"):
            return "", ""
        choice = chunk["choices"][0]
        delta = choice["delta"]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        thought, said = delta.get("reasoning") or "", delta.get("content") or ""
        self.reasoning += thought
        self.content += said
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(self.calls):
                name = part["function"]["name"]
                self.calls.append({"id": part["id"], "type": "function", "function": {"name": name, "arguments": ""}})
            self.calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
        return thought, said

    def message(self) -> Json:
        """As the next request repeats it."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content or None, **calls}


def printable(text: str) -> str:
    """Without control characters: what a model says must not steer the terminal."""
    return text.translate(_UNPRINTABLE)


def run(options: argparse.Namespace) -> int:
    tools = None
    if options.tools is not None:
        try:
            tools = json.loads(options.tools.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            print(f"{options.tools}: this is no file with a JSON list of tools: {error}", file=sys.stderr)
            return USAGE_ERROR
    if not has_key(options):
        return USAGE_ERROR
    words = " ".join(options.words) or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not words and not sys.stdin.isatty():
        print("nothing to ask: give words, or write them to stdin", file=sys.stderr)
        return USAGE_ERROR
    with asyncio.Runner() as runner:
        client, closing = runner.run(_open(options))
        chat = _Chat(options, client, runner, tools)
        try:
            return chat.once(words) if words else chat.talk()
        finally:
            runner.run(closing.aclose())


async def _open(options: argparse.Namespace) -> tuple[Client, AsyncExitStack]:
    stack = AsyncExitStack()
    return await stack.enter_async_context(connected(options)), stack


class _Chat:
    """The loop is run for each answer alone, so that Ctrl-C cancels that one and nothing else."""

    def __init__(self, options: argparse.Namespace, client: Client, runner: asyncio.Runner, tools: Any) -> None:
        self._options, self._client, self._runner, self._tools = options, client, runner, tools
        self._model: str | None = options.model
        self._messages: list[Json] = []
        self._out, self._err = Console(soft_wrap=True), Console(stderr=True)
        self._new()

    def once(self, words: str) -> int:
        """One question; the answer to stdout. With a terminal there, its reasoning too, dimmed."""
        began = time.perf_counter()
        try:
            answer = self._answered(words)
        except _NoAnswer as problem:
            print(problem, file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return STOPPED
        if self._options.json:
            told = {name: getattr(answer, name) for name in ("model", "content", "reasoning", "finish_reason", "usage")}
            print(json.dumps({**told, "tool_calls": answer.calls, "seconds": time.perf_counter() - began}, indent=2))
        return 0

    def talk(self) -> int:
        import_module("readline")  # gives the prompt a history and the arrow keys

        print(_HELP)
        while True:
            try:
                words = input("\n> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\nCtrl-D ends")
                continue
            if words.startswith("/"):
                self._obey(words)
            elif words:
                self._turn(words)

    def _new(self) -> None:
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _obey(self, words: str) -> None:
        match words.split():
            case ["/new"]:
                self._new()
            case ["/model", name]:
                self._model = name
            case _:
                print(_HELP)

    def _turn(self, words: str) -> None:
        """Ask, and go on with the results of calls until there are none. A turn that fails leaves no trace."""
        before = len(self._messages)
        try:
            answer = self._answered(words)
            while answer.calls:
                for call in answer.calls:
                    result = input(f"result of {printable(call['function']['name'])}: ")
                    self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                answer = self._answered(None)
        except (_NoAnswer, KeyboardInterrupt, EOFError) as ended:
            del self._messages[before:]
            print(f"\n{ended}" if isinstance(ended, _NoAnswer) else "\nstopped")

    def _answered(self, words: str | None) -> Answer:
        """Raises _NoAnswer with one line."""
        if words is not None:
            self._messages.append({"role": "user", "content": words})
        try:
            answer = self._runner.run(self._ask())
        except Refused as refused:
            raise _NoAnswer(str(refused)) from None
        except NOT_THERE as error:
            raise _NoAnswer(not_there(self._options, error)) from None
        self._messages.append(answer.message())
        return answer

    def _body(self) -> Json:
        options = self._options
        asked: Json = {"messages": self._messages, "stream": True, "stream_options": {"include_usage": True}}
        given = {"model": self._model, "tools": self._tools, "max_tokens": options.max_tokens}
        asked |= {name: value for name, value in given.items() if value is not None}
        if options.no_thinking:
            asked["chat_template_kwargs"] = {"enable_thinking": False}
        return asked

    async def _ask(self) -> Answer:
        answer = Answer()
        with Status("", console=self._err) as waiting:
            async with aclosing(self._client.events("POST", "/v1/chat/completions", self._body())) as events:
                async for event in events:
                    if event.data is None:
                        waiting.update(printable(event.comment or ""))
                    else:
                        waiting.stop()
                        self._show(answer, *answer.take(event.data))
        if not self._options.json:
            self._show_calls(answer)
        return answer

    def _show(self, answer: Answer, thought: str, said: str) -> None:
        if self._options.json:
            return
        if thought and self._out.is_terminal:
            self._write(thought, "dim")
        if said:
            if answer.content == said and answer.reasoning and self._out.is_terminal:
                self._write("\n\n")
            self._write(said)

    def _show_calls(self, answer: Answer) -> None:
        for call in answer.calls:
            self._write(f"\n-> {call['function']['name']} {call['function']['arguments']}", "cyan")
        self._write("\n")
        if answer.finish_reason == "length":
            self._err.print("(cut: the token limit is reached)", style="dim")

    def _write(self, text: str, style: str | None = None) -> None:
        self._out.print(printable(text), end="", style=style, markup=False, highlight=False, emoji=False)
        self._out.file.flush()


class _NoAnswer(Exception):
    pass
