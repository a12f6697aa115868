"""vLLM's own parsers on our texts, for comparison. Importing this takes a while, and needs vllm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from citadel.messages import ToolSpec
from citadel.text.formats import FORMATS
from tests.text.harness import Answer

TOOL_PARSERS = {
    "qwen3_xml": "qwen3_coder",
    "phi4_mini": "phi4_mini_json",
    **{name: name for name in FORMATS if name not in ("qwen3_xml", "phi4_mini", "harmony", "plain")},
}
REASONING_PARSERS = {
    "qwen3_xml": "qwen3",
    "hermes": "qwen3",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v3": "deepseek_r1",
    "glm47": "glm45",
    "kimi_k2": "kimi_k2",
    "gemma4": "gemma4",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
}


_THINK = "<think> </think> "
SPECIAL = {
    "qwen3_xml": _THINK + "<tool_call> </tool_call>",
    "hermes": _THINK + "<tool_call> </tool_call>",
    "deepseek_v41": _THINK + "｜DSML｜",
    "deepseek_v4": _THINK + "｜DSML｜",
    "deepseek_v32": _THINK + "｜DSML｜",
    "deepseek_v31": _THINK
    + "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>",
    "deepseek_v3": _THINK
    + "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>",
    "llama3_json": "<|python_tag|>",
    "pythonic": "<|python_start|> <|python_end|>",
    "mistral": "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    "glm47": _THINK + "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    "kimi_k2": _THINK + "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|>",
    "gemma4": '<|tool_call> <tool_call|> <|"|> <|channel> <channel|>',
    "functiongemma": "<start_function_call> <end_function_call> <escape>",
    "minimax_m2": _THINK + "<minimax:tool_call> </minimax:tool_call>",
    "granite": "<|tool_call|>",
    "phi4_mini": "<|tool_call|>",
}
"""The special tokens of these models, as far as their parsers look for them."""


class Tokens:
    """As much of a tokenizer as the parsers ask for when they are given no token ids: its special tokens."""

    supports_grammar = True
    chat_template = None
    version = 13

    def __init__(self, fmt: str) -> None:
        self.ids = {text: number for number, text in enumerate(SPECIAL[fmt].split(), start=1)}
        self.all_special_tokens = list(self.ids)
        self.all_special_ids = list(self.ids.values())

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    @property
    def vocab(self) -> dict[str, int]:
        return self.ids

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.ids.get(text, 0)]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.ids.get(token)

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""

    def __len__(self) -> int:
        return 1000


class Peer:
    def __init__(self, fmt: str, tools: Sequence[ToolSpec]) -> None:
        self._fmt = fmt
        self._tools = [
            ChatCompletionToolsParam.model_validate(
                {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters or {})}}
            )
            for tool in tools
        ]
        self.request = ChatCompletionRequest.model_validate(
            {
                "messages": [{"role": "user", "content": "x"}],
                "model": "m",
                "tools": [tool.model_dump() for tool in self._tools],
                "tool_choice": "auto",
            }
        )

    def parser(self) -> Any:
        return ToolParserManager.get_tool_parser(TOOL_PARSERS[self._fmt])(Tokens(self._fmt), self._tools)

    def whole(self, raw: str) -> Answer:
        found = self.parser().extract_tool_calls(raw, self.request)
        calls = tuple((call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls)
        return Answer(None, found.content or None, calls)

    def streamed(self, pieces: Sequence[str]) -> Answer:
        parser = self.parser()
        before, content = "", ""
        calls: dict[int, list[str]] = {}
        for piece in pieces:
            now = before + piece
            delta = parser.extract_tool_calls_streaming(before, now, piece, [], [], [], self.request)
            before = now
            if delta is None:
                continue
            content += delta.content or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
        return Answer(None, content or None, tuple((name, json.loads(text)) for name, text in calls.values()))

    def reasoning(self, raw: str) -> tuple[str | None, str | None]:
        parser = ReasoningParserManager.get_reasoning_parser(REASONING_PARSERS[self._fmt])(Tokens(self._fmt))
        return parser.extract_reasoning(raw, self.request)
