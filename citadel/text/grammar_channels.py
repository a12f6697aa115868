"""Outputs made of messages with headers (harmony): which messages there may be, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from citadel.errors import BadRequest
from citadel.text.channels import MARKERS
from citadel.text.grammar_frames import Offered
from citadel.text.grammar_lark import Lark, either, quoted, seq, without
from citadel.text.grammar_tagged import writable

_MESSAGE: Final = "<|message|>"
_NEXT: Final = "<|start|>assistant"
_ENDS: Final = ("<|return|>", "<|end|>")
_FREE: Final = without((*MARKERS, _MESSAGE))


class Channels:
    """The prompt ends inside the first header, so an output begins with a channel, or with a recipient."""

    def __init__(self, lark: Lark, tools: Sequence[Offered], *, several: bool) -> None:
        self._lark = lark
        self._tools = [tool for tool in tools if writable(tool.name, " <\t")]
        self._several = several

    def reasoning(self) -> str:
        return self._message("analysis")

    def end_of_reasoning(self) -> str:
        """Where the prompt has begun the analysis."""
        return seq(self._lark.until("<|end|>", _FREE), self._lark.literal(_NEXT))

    def preamble(self) -> str:
        return self._message("commentary")

    def answer(self, content: str | None) -> str:
        """The last message; free text where `content` is None."""
        typed = f"({quoted(' ')} {self._lark.literal('<|constrain|>json')})?" if content is not None else ""
        header = seq(self._lark.literal("<|channel|>final"), typed, self._lark.literal(_MESSAGE))
        if content is None:
            said = either([f"{self._lark.free(_FREE)}?", *(self._lark.until(end, _FREE) for end in _ENDS)])
        else:
            said = seq(content, f"{either(map(self._lark.literal, _ENDS))}?")
        return seq(header, said)

    def calls(self) -> str:
        if not self._tools:
            raise BadRequest("tools: the functions' names can't be written in this model's notation", "tools")
        call = self._lark.rule(either(way for tool in self._tools for way in self._ways(tool)))
        end = self._lark.literal("<|call|>")
        more = f"({end} {self._lark.literal(_NEXT)} {call})*" if self._several else ""
        return seq(call, more, f"({end})?")

    def _ways(self, tool: Offered) -> list[str]:
        arguments = self._lark.json(tool.arguments.schema, tool.arguments.definitions)
        recipient = quoted(f" to=functions.{tool.name}")
        channel = self._lark.literal("<|channel|>commentary")
        rest = seq(quoted(" "), self._lark.literal("<|constrain|>json<|message|>"), arguments)
        return [seq(channel, recipient, rest), seq(recipient, channel, rest)]

    def _message(self, channel: str) -> str:
        return seq(
            self._lark.literal(f"<|channel|>{channel}{_MESSAGE}"),
            self._lark.until("<|end|>", _FREE),
            self._lark.literal(_NEXT),
        )
