"""Frames of calls -> rules: what a model may write once a call has begun, in each of its notations.

Names, markers and punctuation are the family's own; line breaks between the parts of a frame may be left out. A
family that has several frames may use any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from citadel.errors import BadRequest
from citadel.text.coerce import quoted as json_string
from citadel.text.formats import Format, Frame, Tagged
from citadel.text.grammar_dialect import DialectArguments
from citadel.text.grammar_lark import COMMA, NEWLINE, Lark, NoWay, either, escaped, quoted, seq
from citadel.text.grammar_schema import ANY_OBJECT, Enforced
from citadel.text.grammar_tagged import TaggedArguments, slots, writable
from citadel.text.lexer import Maybe, Part, Slot, Space
from citadel.text.values import JSON

_PARAMETERS: Final = frozenset({"llama3_json"})
"""Formats whose objects name the arguments so; the others say `arguments`."""

_SPACE: Final = r"\s{0,2}"

_LISTS: Final = frozenset({"phi4_mini"})
"""Formats whose blocks hold a list though it has an end marker of its own."""


@dataclass(frozen=True)
class Offered:
    """A function that may be called. `where` is the path of its schema in the body."""

    name: str
    arguments: Enforced
    where: str
    strict: bool


class Frames:
    """The rules of one format. `several`: more than one call may be made. `beside_json`: an answer in JSON may be."""

    def __init__(self, lark: Lark, fmt: Format, tools: Sequence[Offered], *, several: bool, beside_json: bool) -> None:
        self._lark = lark
        self._format = fmt
        self._tools = tools
        self._several = several
        self._beside_json = beside_json
        self._written: dict[tuple[str, object], str] = {}
        self.left_out: list[str] = []

    def markers(self) -> list[str]:
        """What begins a call anywhere in text."""
        heads = [frame.head[0] for frame in self._format.frames if frame.loose and isinstance(frame.head[0], str)]
        return list(dict.fromkeys([*(frame.open for frame in self._format.frames), *heads]))

    def no_bare_call(self, names: Sequence[str]) -> str:
        """The condition on a text that it does not begin like a call that has no marker."""
        known = "|".join(map(escaped, names))
        openings = {
            "{": rf"\{{([^{{}}]*[\"']name[\"']\s*:\s*[\"']({known})[\"']|\s*[\"'](arguments|parameters)[\"']\s*:)",
            "[": rf"\[\s*({known})\s*\(",
        }
        begun = [rf"[\s{frame.separator}]*{openings[frame.bare]}" for frame in self._format.frames if frame.bare]
        return "".join(f" & ~/{opening}(?s:.*)/" for opening in begun)

    @property
    def chained(self) -> bool:
        """Whether text after a call can make it the first of several."""
        return any(frame.separator for frame in self._format.frames)

    def after(self, marker: str) -> str:
        """What follows a marker that began a call: the rest of the block, or of a call on its own."""
        ways: list[str] = []
        for frame in self._format.frames:
            if marker == frame.open:
                ways.append(self._block(frame))
            elif frame.loose and frame.head[0] == marker:
                ways.append(self._call_rule(frame, frame.head[1:]))
        return either(ways)

    def bare(self) -> str | None:
        """A block that has no marker, whitespace before it included."""
        found = [self._bare(frame) for frame in self._format.frames if frame.bare]
        return either(found) if found else None

    def calls(self) -> str:
        """At least one call, and nothing else."""
        frames = self._format.frames
        native = [frame for frame in frames if frame is frames[0] or self._lark.token(frame.open) is not None]
        blocks = [seq(self._lark.literal(frame.open), self._block(frame)) for frame in native]
        blocks += [self._bare(frame) for frame in frames if frame.bare]
        block = self._lark.rule(either(blocks))
        single = not self._several or all(self._many(frame) or frame.separator for frame in native)
        return block if single else f"{block} ({NEWLINE} {block})*"

    def _block(self, frame: Frame) -> str:
        if frame.separator:
            return seq(NEWLINE, self._chain(frame))
        call = self._call_rule(frame, frame.head)
        close = seq(NEWLINE, self._lark.literal(frame.close)) if frame.close else ""
        if self._listed(frame):
            return seq(NEWLINE, quoted("["), self._more(call, COMMA), quoted("]"), close)
        return seq(NEWLINE, self._more(call, NEWLINE) if self._many(frame) else call, close)

    def _more(self, call: str, separator: str, first: str | None = None) -> str:
        return f"{first or call} ({separator} {call})*" if self._several else first or call

    def _listed(self, frame: Frame) -> bool:
        if self._native_head(frame) and frame.arguments == JSON:
            return False
        alone = bool(frame.head) or not (frame.close or frame.separator)
        return frame.listed and (alone or self._format.name in _LISTS)

    def _many(self, frame: Frame) -> bool:
        """Whether a block of this frame holds several calls: where it does not, each call has its own."""
        return self._listed(frame) or (frame.loose and not frame.objects)

    def _native_head(self, frame: Frame) -> bool:
        """Whether calls have a head, and are no objects: where a head holds markers, the model knows them."""
        marks = [part.parts[0] for part in frame.head if isinstance(part, Maybe) and not slots(part.parts)]
        known = all(self._lark.token(mark) is not None for mark in marks if isinstance(mark, str))
        return bool(frame.head) and (known or not frame.objects)

    def _chain(self, frame: Frame, before: str = "") -> str:
        """Objects with a separator between them."""
        first = self._one_of(frame, lambda tool: self._object(tool, before))
        if not self._several:
            return first
        # Text may come after a call as well, so a separator and what follows it are one lexeme.
        further = self._one_of(frame, lambda tool: self._object(tool, f"{escaped(frame.separator)} ?"))
        return f"{first} {further}*"

    def _bare(self, frame: Frame) -> str:
        # Text may stand here as well, and is read as one lexeme: so what tells the two apart must be one too.
        if frame.objects:
            return self._chain(frame, _SPACE)
        first = self._one_of(
            frame,
            lambda tool: seq(self._lark.terminal(rf"/{_SPACE}\[{escaped(tool.name)}\(/"), self._arguments(frame, tool)),
        )
        return seq(self._more(self._call_rule(frame, frame.head), COMMA, first), quoted("]"))

    def _call_rule(self, frame: Frame, head: Sequence[Part]) -> str:
        if not self._native_head(frame):
            return self._one_of(frame, self._object)
        return self._one_of(frame, lambda tool: self._headed(frame, head, tool))

    def _one_of(self, frame: Frame, write: Callable[[Offered], str]) -> str:
        slot = next(iter(slots(frame.head)), None)
        fit = [tool for tool in self._tools if slot is None or writable(tool.name, slot.stop)]
        if not fit:
            raise BadRequest("tools: the functions' names can't be written in this model's notation", "tools")
        return self._lark.rule(either(map(write, fit)))

    def _object(self, tool: Offered, before: str = "") -> str:
        """`{"name": ..., "arguments": {...}}`."""
        key = "parameters" if self._format.name in _PARAMETERS else "arguments"
        if self._beside_json and any(frame.bare == "{" for frame in self._format.frames):
            # Its lexemes must be those of the answer, or the first brace would decide which of the two it is.
            members = {"name": {"const": tool.name}, key: tool.arguments.schema}
            schema = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
            separator = f"/{before}/" if before not in ("", _SPACE) else ""
            return seq(separator, self._lark.json(schema, tool.arguments.definitions))
        opening = rf'/{before}\{{"name": ?{escaped(json_string(tool.name))}, ?"{key}": ?/'
        return seq(
            self._lark.terminal(opening),
            self._lark.json(tool.arguments.schema, tool.arguments.definitions),
            quoted("}"),
        )

    def _headed(self, frame: Frame, head: Sequence[Part], tool: Offered) -> str:
        parts: list[str] = []
        for before, part in zip([None, *head], head, strict=False):
            # A name that does not end at a line break would hold it.
            tight = isinstance(part, Space) and isinstance(before, Slot) and "\n" not in before.stop
            parts.append("" if tight else self._part(part, tool))
        tail = [self._part(part, tool) for part in frame.tail]
        return seq(*parts, self._arguments(frame, tool), *tail)

    def _part(self, part: Part, tool: Offered) -> str:
        if isinstance(part, str):
            return self._lark.literal(part)
        if isinstance(part, Slot):
            return quoted(tool.name) if part.key == "name" else f"{quoted(f'functions.{tool.name}:')} /[0-9]{{1,3}}/"
        if isinstance(part, Maybe):
            return "" if slots(part.parts) else seq(*(self._part(each, tool) for each in part.parts))
        return NEWLINE

    def _arguments(self, frame: Frame, tool: Offered) -> str:
        key = (tool.name, frame.arguments)
        if key not in self._written:
            try:
                self._written[key] = self._lark.rule(self._arguments_of(frame, tool, tool.arguments))
            except NoWay:
                self._refuse(tool, "type")
                self._written[key] = self._lark.rule(self._arguments_of(frame, tool, Enforced(ANY_OBJECT)))
        return self._written[key]

    def _arguments_of(self, frame: Frame, tool: Offered, arguments: Enforced) -> str:
        def refuse(keyword: str) -> None:
            self._refuse(tool, keyword)

        syntax = frame.arguments
        if isinstance(syntax, Tagged):
            return seq(NEWLINE, TaggedArguments(self._lark, arguments, syntax, refuse).of(arguments.schema))
        if syntax == JSON:
            return seq(NEWLINE, self._lark.json(arguments.schema, arguments.definitions), NEWLINE)
        written = DialectArguments(self._lark, arguments, syntax, refuse).of(arguments.schema)
        return seq("" if syntax.assign == "=" else quoted("{"), written)

    def _refuse(self, tool: Offered, keyword: str) -> None:
        if tool.strict:
            raise BadRequest(f"{tool.where}: {keyword} can't be enforced in this model's notation of calls", tool.where)
        self.left_out.append(f"{tool.where}: {keyword}")
