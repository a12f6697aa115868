"""The prompts that we write for DeepSeek's models, whole and literal."""

from __future__ import annotations

import pytest

from citadel.messages import Message, ToolCall, ToolSpec
from citadel.text.prompts_deepseek import WRITTEN_HERE, render

BOS, EOS, USER, BOT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SYSTEM = Message("system", "Be brief.")
HELLO = Message("user", "Hello")
HI = Message("assistant", "Hi!", reasoning="A greeting.")
MORE = Message("user", "And now?")
TOOL = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
CALLED = Message(
    "assistant",
    "Wait.",
    reasoning="Add.",
    tool_calls=(ToolCall("c1", "add", '{"a": 1, "s": "é"}'), ToolCall("c2", "add", "{}")),
)
RESULTS = (Message("tool", "two", tool_call_id="c2"), Message("tool", "one", tool_call_id="c1"))


@pytest.mark.parametrize("fmt", ["deepseek_v32", "deepseek_v4"])
def test_a_question(fmt: str) -> None:
    assert render(fmt, [SYSTEM, HELLO], thinking=True) == f"{BOS}Be brief.{USER}Hello{BOT}<think>"
    assert render(fmt, [HELLO], thinking=False) == f"{BOS}{USER}Hello{BOT}</think>"


def test_a_question_to_v41() -> None:
    effort = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    assert render("deepseek_v41", [HELLO], thinking=True) == f"{BOS}<｜System｜>{effort}{USER}Hello{BOT}<think>"
    assert render("deepseek_v41", [SYSTEM, HELLO], thinking=False) == (
        f"{BOS}<｜System｜>Be brief.{USER}Hello{BOT}</think>"
    )
    assert render("deepseek_v41", [HELLO], thinking=False) == f"{BOS}{USER}Hello{BOT}</think>"
    assert "Reasoning Effort: 50 " in render("deepseek_v41", [HELLO], thinking=True, effort="low")
    assert "Effort" not in render("deepseek_v41", [HELLO], thinking=False, effort="max")


def test_effort_of_v4() -> None:
    assert render("deepseek_v4", [HELLO], thinking=True, effort="max").startswith(f"{BOS}Reasoning Effort: Beyond")
    assert render("deepseek_v4", [HELLO], thinking=True, effort="low") == f"{BOS}{USER}Hello{BOT}<think>"


@pytest.mark.parametrize("fmt", sorted(WRITTEN_HERE))
def test_reasoning_of_earlier_turns_is_left_out(fmt: str) -> None:
    prompt = render(fmt, [HELLO, HI, MORE], thinking=True)
    assert prompt.endswith(f"{USER}Hello{BOT}</think>Hi!{EOS}{USER}And now?{BOT}<think>")


@pytest.mark.parametrize("fmt", ["deepseek_v4", "deepseek_v41"])
def test_reasoning_stays_where_there_are_tools(fmt: str) -> None:
    prompt = render(fmt, [HELLO, HI, MORE], [TOOL], thinking=True)
    assert prompt.endswith(f"{USER}Hello{BOT}<think>A greeting.</think>Hi!{EOS}{USER}And now?{BOT}<think>")


def test_calls_and_results_of_v4() -> None:
    prompt = render("deepseek_v4", [HELLO, CALLED, *RESULTS], thinking=False)
    assert prompt == (
        f"{BOS}{USER}Hello{BOT}</think>Wait.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="s" string="true">é</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="add">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{EOS}"
        f"{USER}<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>{BOT}</think>"
    )


def test_calls_of_v41_have_a_space_in_their_tags() -> None:
    prompt = render("deepseek_v41", [HELLO, CALLED, *RESULTS], thinking=False)
    assert '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n<｜DSML｜ parameter name="a" ' in prompt
    assert f"</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}" in prompt


def test_calls_and_results_of_v32() -> None:
    prompt = render("deepseek_v32", [HELLO, CALLED, *RESULTS], thinking=True)
    assert prompt.startswith(f"{BOS}{USER}Hello{BOT}<think>Add.</think>Wait.\n\n<｜DSML｜function_calls>\n")
    assert prompt.endswith(
        f"</｜DSML｜function_calls>{EOS}\n\n<function_results>\n<result>one</result>\n<result>two</result>\n"
        "</function_results>\n\n<think>"
    )


@pytest.mark.parametrize("fmt", sorted(WRITTEN_HERE))
def test_tools_are_described_after_the_system_message(fmt: str) -> None:
    prompt = render(fmt, [SYSTEM, HELLO], [TOOL], thinking=False)
    assert "Be brief.\n\n## Tools\n" in prompt
    parameters = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    schema = f'{{"name": "add", "description": "Adds.", "parameters": {parameters}}}'
    assert f"\n{schema}\n" in prompt
    assert "{tag}" not in prompt
    assert "{schemas}" not in prompt


@pytest.mark.parametrize("fmt", sorted(WRITTEN_HERE))
def test_going_on_with_the_last_message(fmt: str) -> None:
    assert render(fmt, [HELLO, Message("assistant", "Hi th")], thinking=False, continues=True).endswith("</think>Hi th")


def test_arguments_that_are_no_object_stay_readable() -> None:
    call = Message("assistant", tool_calls=(ToolCall("c", "add", "oops"),))
    assert 'name="arguments" string="true">oops<' in render("deepseek_v4", [HELLO, call, MORE], thinking=False)


@pytest.mark.parametrize("fmt", sorted(WRITTEN_HERE))
@pytest.mark.parametrize("thinking", [True, False])
def test_as_vllm_writes_them(fmt: str, thinking: bool) -> None:
    """A peer's encoder gives the same text, for conversations that both can write."""
    name = {"deepseek_v32": "deepseek_v32", "deepseek_v4": "deepseek_v4", "deepseek_v41": "deepseek_v41"}[fmt]
    encoding = pytest.importorskip(f"vllm.tokenizers.{name}_encoding", reason="vllm is not installed")
    own = "reasoning_content" if fmt == "deepseek_v41" else "reasoning"
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in CALLED.tool_calls
    ]
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    system = {"role": "system", "content": "Be brief."}
    hello, more = {"role": "user", "content": "Hello"}, {"role": "user", "content": "And now?"}
    hi = {"role": "assistant", "content": "Hi!", own: "A greeting."}
    called = {"role": "assistant", "content": "Wait.", own: "Add.", "tool_calls": calls}
    results = [
        {"role": "tool", "content": text, "tool_call_id": ident} for text, ident in (("one", "c1"), ("two", "c2"))
    ]
    ours = (Message("tool", "one", tool_call_id="c1"), Message("tool", "two", tool_call_id="c2"))
    for theirs, messages, tools in (
        ([system, hello, hi, more], [SYSTEM, HELLO, HI, MORE], ()),
        ([hello, called, *results], [HELLO, CALLED, *ours], ()),
        (
            [{**system, "tools": [{"function": function}]}, hello, called, *results],
            [SYSTEM, HELLO, CALLED, *ours],
            (TOOL,),
        ),
        ([{**system, "tools": [{"function": function}]}, hello, hi, more], [SYSTEM, HELLO, HI, MORE], (TOOL,)),
    ):
        mode = "thinking" if thinking else "chat"
        assert render(fmt, messages, tools, thinking=thinking) == encoding.encode_messages(theirs, mode)
