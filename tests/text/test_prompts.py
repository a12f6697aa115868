"""What a model is given of tools that its template does not render, and which grammars are kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from citadel.messages import ChatRequest
from citadel.text import prompts
from citadel.text.formats import FORMATS
from citadel.text.grammar import Grammar
from citadel.text.template import render
from citadel.wire.request import chat_request
from engines.replay import ReplayTokenizer

ROLES = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
WITH_TOOLS = ROLES + "{% for t in tools %}{{ t.function.name }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "me"}'}}
HISTORY = [
    USER,
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    {"role": "tool", "tool_call_id": "c2", "content": "heard"},
]


def asking(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return chat_request({"messages": list(messages or [USER]), **fields}, "m", "m")


def test_tools_go_to_the_template_that_renders_them() -> None:
    assert render(asking(tools=[TOOL]), WITH_TOOLS, {}) == "[user:hi]look"


def test_tools_that_the_template_does_not_render_are_told_in_a_system_message() -> None:
    rendered = render(asking(tools=[TOOL]), ROLES, {})
    assert rendered.startswith("[system:")
    assert rendered.endswith("[user:hi]")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in rendered
    assert "<tool_call>" in rendered


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_callers_own_system_message_comes_first(role: str) -> None:
    rendered = render(asking({"role": role, "content": "Be brief."}, USER, tools=[TOOL]), ROLES, {})
    assert rendered.startswith("[system:Be brief.\n\n")
    assert rendered.count("[system:") == 1
    assert '"look"' in rendered


def test_calls_and_their_results_are_told_in_words_too() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "me"}}\n</tool_call>'
    results = "<tool_response>\nseen\n</tool_response>\n<tool_response>\nheard\n</tool_response>"
    assert render(asking(*HISTORY), ROLES, {}) == f"[user:hi][assistant:Well.\n{call}][user:{results}]"


def test_without_tools_nothing_is_added() -> None:
    assert render(asking(tool_choice="none"), ROLES, {}) == "[user:hi]"


def test_calls_are_read_in_the_notation_in_which_they_were_told() -> None:
    for name in ("plain", "llama3_json", "gemma4"):
        used = prompts.with_calls(FORMATS[name], ROLES)
        assert (used.name, used.frames, used.thinking) == (
            "hermes",
            FORMATS["hermes"].frames,
            FORMATS[name].thinking,
        )
    assert prompts.with_calls(FORMATS["llama3_json"], WITH_TOOLS) is FORMATS["llama3_json"]
    assert prompts.with_calls(FORMATS["plain"], WITH_TOOLS).name == "hermes"
    assert prompts.with_calls(FORMATS["harmony"], WITH_TOOLS) is FORMATS["harmony"]


def keyed(*, thinking: bool = False, **fields: Any) -> prompts.Key | None:
    template = ROLES + ("<think>" if thinking else "")
    request, tokenizer = asking(**fields), ReplayTokenizer("", {})
    hermes = prompts.spoken(FORMATS["hermes"], tokenizer)
    return prompts.grammar_key(request, prompts.make(request, template, hermes))


def test_a_grammar_is_known_by_all_that_determines_it() -> None:
    schema = {"type": "json_object"}
    keys = [
        keyed(tools=[TOOL]),
        keyed(tools=[TOOL], tool_choice="required"),
        keyed(tools=[TOOL], tool_choice="none"),
        keyed(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}),
        keyed(tools=[TOOL], parallel_tool_calls=False),
        keyed(tools=[TOOL], response_format=schema),
        keyed(response_format=schema),
        keyed(tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}]),
        keyed(tools=[TOOL], thinking=True),
    ]
    assert len(set(keys)) == len(keys)
    assert None not in keys
    assert keyed(tools=[TOOL]) == keys[0]
    assert keyed() is None


def test_the_least_recently_used_grammar_is_forgotten() -> None:
    grammars = prompts.Grammars()
    keys = [(str(number), "") for number in range(200)]
    for key in keys:
        grammars.keep(key, Grammar(key[0]))
        assert keys[0] in grammars
        assert grammars[keys[0]] == Grammar("0")
    assert keys[1] not in grammars
    assert keys[-1] in grammars


def test_what_is_not_enforced_is_told_once() -> None:
    grammars = prompts.Grammars()
    assert grammars.keep(("tools", "auto"), Grammar("", ("a.not", "b.if"))) == ["a.not", "b.if"]
    assert grammars.keep(("tools", "required"), Grammar("", ("a.not",))) == []
    assert grammars.keep(("others", "auto"), Grammar("", ("a.not",))) == ["a.not"]
    assert grammars.keep(("none", "auto"), None) == []
