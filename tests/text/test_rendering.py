"""A conversation is rendered by the model's own template, as clients send it; a template's refusal is a 400."""

from __future__ import annotations

from typing import Any

import pytest

from citadel.errors import BadRequest
from citadel.messages import ChatRequest
from citadel.text import prompts
from citadel.text.formats import FORMATS
from citadel.text.template import FALLBACK, opens_reasoning, render
from citadel.wire.request import chat_request
from engines.replay import ReplayTokenizer

ROLES = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def asking(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return chat_request({"messages": list(messages), **fields}, "m", "m")


USER = {"role": "user", "content": "hi"}


def test_weights_without_a_template_get_chatml() -> None:
    assert render(asking(USER), None, {}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_developer_message_is_the_systems_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "be brief"}
    assert render(asking(message), ROLES, {}) == "[system:be brief]"
    knows = ROLES + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert render(asking(message), knows, {}) == "[developer:be brief]!"


def test_arguments_of_calls_are_given_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": [1]}}'}}
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.a.b[0] }}{% endfor %}{% endfor %}"
    )
    assert render(asking({"role": "assistant", "tool_calls": [call]}), template, {}) == "1"


def test_arguments_that_are_no_json_are_left_to_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(asking({"role": "assistant", "tool_calls": [call]}), template, {}) == "{broken"


def test_tools_special_tokens_and_kwargs_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    request = asking(USER, tools=[tool], chat_template_kwargs={"shade": "blue"}, reasoning_effort="low")
    template = "{{ bos_token }}{{ tools[0].function.name }} {{ shade }} {{ reasoning_effort }} {{ enable_thinking }}"
    assert render(request, template, {"bos_token": "<s>"}) == "<s>f blue low True"


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_is_on_unless_the_caller_says_otherwise(fields: dict[str, Any], on: bool) -> None:
    assert render(asking(USER, **fields), "{{ enable_thinking }}", {}) == str(on)


def test_a_final_message_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    text = render(asking(*messages, continue_final_message=True), FALLBACK, {})
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(BadRequest, match="the final message is not the assistant's"):
        render(asking(USER, continue_final_message=True), FALLBACK, {})


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 5 }}", "can only concatenate str"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% for", "nexpected"),
        ("{{ messages.append(1) }}", "is not safe|unsafe|not allowed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_templates_refusal_is_told_to_the_caller(template: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        render(asking(USER), template, {})
    assert caught.value.message.startswith("The model's chat template refused the messages: ")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_kwarg_that_the_server_sets_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"chat_template_kwargs.{name}"):
        render(asking(USER, chat_template_kwargs={name: 1}), ROLES, {})


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("user says <think>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n", False),
    ],
)
def test_reasoning_is_open_only_if_the_prompt_ends_so(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt, "<think>") is opens


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_families_without_a_template_get_the_prompt_that_is_written_here(name: str) -> None:
    tokenizer = ReplayTokenizer("", {})
    made = prompts.make(asking(USER), None, prompts.spoken(FORMATS[name], tokenizer))
    text = tokenizer.decode(made.token_ids)
    assert text.endswith("<｜Assistant｜><think>")
    assert made.reading.in_reasoning
    off = prompts.make(asking(USER, reasoning_effort="none"), None, prompts.spoken(FORMATS[name], tokenizer))
    assert tokenizer.decode(off.token_ids).endswith("<｜Assistant｜></think>")
    assert not off.reading.in_reasoning
