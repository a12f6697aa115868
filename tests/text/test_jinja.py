"""A template makes the same text here as in transformers, and fails with the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from citadel.text import jinja
from citadel.text.template import FALLBACK
from tests.models.generate import TEMPLATE
from tests.text.test_templates import FETCHED, OURS

BITS = {
    "blocks": "  {% if true %}\n  a\n  {%- endif %}  \n {# gone #}\n{{ 'b' }}\n",
    "loop controls": "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% elif n == 5 %}{% break %}{% endif %}"
    "{{ n }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}\n  {% set x = m.role %}{{ x }}{{ loop.index }}\n"
    "{%- endgeneration %}{% endfor %}{{ x }}",
    "json": "{{ messages | tojson }}{{ '<ü>' | tojson }}{{ 'ü' | tojson(true) }}{{ messages | tojson(indent=2) }}"
    "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}{{ undefined_thing | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "filters": "{{ messages | map(attribute='role') | join('-') }}{{ {'a': 1} | items | list }}",
    "nothing": "{{ bos_token }}{{ documents is none }}{{ tools is none }}{{ nobody }}{{ nobody is defined }}",
    "autoescape": "{{ '<&>' }}{{ '<b>' | e }}",
    "changes": "{{ messages.append(1) }}",
    "escapes": "{{ ''.__class__.__mro__ }}",
    "raises": "{{ raise_exception('roles must alternate') }}",
    "breaks": "{{ messages[0].content + 5 }}",
    "is cut": "{% for m in messages",
    "has no such filter": "{{ 1 | no_such_filter }}",
    "reads nothing": "{{ nobody.at.all }}",
}
"""Templates of one feature each, and each way to fail."""

USER = {"role": "user", "content": 'What\'s 2 < 3 & "4"?  \n ü 🙂'}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1abcd",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1, "b": ["x", {"y": 2.5}]}},
        }
    ],
}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "whole": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": " Yes. ", "reasoning_content": "Hm.", "reasoning": "Hm."},
        {"role": "user", "content": "And now?"},
        CALL,
        {"role": "tool", "tool_call_id": "call_1abcd", "name": "add", "content": '{"sum": 3}'},
        {"role": "assistant", "content": "It's 3 "},
    ],
    "answered": [USER, {"role": "assistant", "content": "\n  Once upon a  "}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "é"},
                "b": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["a"],
        },
    },
}
VALUES = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}
WAYS: dict[str, dict[str, Any]] = {
    "asks": {"tools": None, "add_generation_prompt": True},
    "offers tools": {"tools": [TOOL], "add_generation_prompt": True},
    "tells": {"tools": None, "add_generation_prompt": False, "enable_thinking": False},
}


def templates() -> dict[str, str]:
    """All that this machine has: those of llama.cpp's and vLLM's packages where they are here, and the tests' own."""
    found = {"tiny": TEMPLATE, "fallback": FALLBACK, **OURS, **BITS}
    for folder in (FETCHED, Path(str(pytest.importorskip("transformers").__file__)).parents[1] / "vllm"):
        found |= {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("**/*.jinja")}
    return found


def outcome(run: Callable[..., str], *given: Any) -> tuple[str, str]:
    try:
        return "text", run(*given)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return type(error).__name__, str(error)


def test_every_template_makes_the_same_text_as_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    _stop_the_clock(monkeypatch, jinja, utils)

    def theirs(source: str, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
        return utils.render_jinja_template([messages], chat_template=source, **values)[0][0]

    rendered = continued = 0
    for name, source in templates().items():
        for talk, messages in TALKS.items():
            for way, more in WAYS.items():
                given = source, messages, {**VALUES, "documents": None, **more}
                ours = outcome(jinja.render, *given)
                assert ours == outcome(theirs, *given), (name, talk, way)
                rendered += ours[0] == "text"
            values = {**VALUES, "documents": None, "tools": None, "add_generation_prompt": False}
            ours = outcome(jinja.render_open, source, messages, values)
            other = outcome(theirs, source, messages, {**values, "continue_final_message": True})
            # It refuses some before it renders them, and then in its own words.
            assert ours == other or ("continue_final_message" in other[1] and ours[0] != "text"), (name, talk)
            continued += ours[0] == "text"
    assert rendered > len(WAYS) * len(TALKS)
    assert continued > len(TALKS)


@pytest.mark.parametrize(
    ("template", "message", "why"),
    [
        (FALLBACK, {"role": "assistant", "content": None}, "has no content"),
        ("{{ messages[0].role }}", {"role": "assistant", "content": "Once"}, "does not appear"),
        ("{{ messages[0].content[:3] }}", {"role": "assistant", "content": "Once"}, "does not appear"),
        ("{{ messages[0].content[2:] }}", {"role": "assistant", "content": "Once"}, "does not appear"),
    ],
)
def test_an_answer_that_the_prompt_does_not_show_can_t_be_continued(
    template: str, message: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        jinja.render_open(template, [message], {})


def test_the_time_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    _stop_the_clock(monkeypatch, jinja)
    assert jinja.render("{{ strftime_now('%d %B %Y, %H:%M') }}", [], {}) == "02 January 2026, 03:04"


def test_json_of_a_template_is_json() -> None:
    value = {"b": [1, None, "</script>"], "a": "ü"}
    assert json.loads(jinja.render("{{ value | tojson(indent=1) }}", [], {"value": value})) == value


def _stop_the_clock(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Stopped:
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    for module in modules:
        monkeypatch.setattr(module, "datetime", Stopped)
