"""Cases of the formats whose arguments are JSON."""

# ruff: noqa: E501 - a raw output stays in one piece

from __future__ import annotations

import json

from tests.text.harness import Answer, Case

OSLO = ("get_weather", {"city": "Oslo", "days": 2})
PING = ("ping", {})
DEEP = json.loads("[" * 99 + "]" * 99)

HERMES = (
    Case(
        "arguments before the name, with a name inside",
        '<tool_call>\n{"arguments": {"city": "Oslo", "name": "bob"}, "name": "get_weather"}\n</tool_call>',
        Answer(calls=(("get_weather", {"city": "Oslo", "name": "bob"}),)),
    ),
    Case("no arguments at all", '<tool_call>\n{"name": "ping"}\n</tool_call>', Answer(calls=(PING,))),
    Case("arguments null", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', Answer(calls=(PING,))),
    Case(
        "parameters for arguments",
        '<tool_call>{"name": "ping", "parameters": {"a": 1}}</tool_call>',
        Answer(calls=(("ping", {"a": 1}),)),
    ),
    Case(
        "arguments as a string",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\", \\"days\\": 2}"}</tool_call>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "arguments that are a list",
        '<tool_call>{"name": "ping", "arguments": [1, "b"]}</tool_call>',
        Answer(content='[1, "b"]', calls=(PING,)),
    ),
    Case(
        "one good call, one malformed",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {oops}}\n</tool_call>',
        Answer(content="oops}}\n", calls=(PING, PING)),
    ),
    Case(
        "malformed before the name",
        '<tool_call>\n{oops, "name": "ping"}\n</tool_call>',
        Answer(content='<tool_call>\n{oops, "name": "ping"}\n</tool_call>'),
    ),
    Case(
        "the outer brace left out",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}\n</tool_call>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "a brace too many",
        '<tool_call>\n{"name": "ping", "arguments": {}}}\n</tool_call>',
        Answer(content="}\n", calls=(PING,)),
    ),
    Case(
        "single quotes",
        "<tool_call>{'name': 'write', 'arguments': {'text': 'a \"b\" \\'c\\''}}</tool_call>",
        Answer(calls=(("write", {"text": "a \"b\" 'c'"}),)),
    ),
    Case(
        "trailing commas",
        '<tool_call>{"name": "search", "arguments": {"tags": ["a", ], }, }</tool_call>',
        Answer(calls=(("search", {"tags": ["a"]}),)),
    ),
    Case(
        "raw line breaks in a string",
        '<tool_call>{"name": "write", "arguments": {"text": "a\n\tb"}}</tool_call>',
        Answer(calls=(("write", {"text": "a\n\tb"}),)),
    ),
    Case(
        "escapes that JSON doesn't know",
        '<tool_call>{"name": "write", "arguments": {"text": "\\d\\x41\\$ \\u00e9\\/ \\u12 \\"}}</tool_call>"}}</tool_call>',
        Answer(calls=(("write", {"text": '\\dA\\$ é/ \\u12 "}}</tool_call>'}),)),
    ),
    Case(
        "a pair of escapes, and half of one",
        '<tool_call>{"name": "write", "arguments": {"text": "\\ud83d\\ude00 \\ud83d! \\ude00"}}</tool_call>',
        Answer(calls=(("write", {"text": "\U0001f600 \ufffd! \ufffd"}),)),
    ),
    Case(
        "True and None",
        '<tool_call>{"name": "search", "arguments": {"exact": True, "limit": None}}</tool_call>',
        Answer(calls=(("search", {"exact": True, "limit": None}),)),
    ),
    Case(
        "a number for a string",
        '<tool_call>{"name": "write", "arguments": {"path": 7, "text": 1.50}}</tool_call>',
        Answer(calls=(("write", {"path": "7", "text": "1.50"}),)),
    ),
    Case(
        "an object in a string",
        '<tool_call>{"name": "search", "arguments": {"where": "{\\"zoom\\": \\"3\\"}", "tags": "[\\"a\\"]"}}</tool_call>',
        Answer(calls=(("search", {"where": {"zoom": 3}, "tags": ["a"]}),)),
    ),
    Case(
        "a list of calls",
        '<tool_call>[{"name": "ping", "arguments": {}}, {"name": "ping"}]</tool_call>',
        Answer(calls=(PING, PING)),
    ),
    Case(
        "two objects in one block",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n{"name": "ping", "arguments": {}}\n</tool_call>',
        Answer(calls=(PING, PING)),
    ),
    Case(
        "members that say nothing",
        '<tool_call>{"id": "call_1", "type": "function", "name": "ping", "arguments": {}}</tool_call>',
        Answer(calls=(PING,)),
    ),
    Case(
        "a member that says something",
        '<tool_call>{"name": "ping", "why": "to see", "arguments": {}}</tool_call>',
        Answer(content='"why": "to see"', calls=(PING,)),
    ),
    Case(
        "a name that is no string",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        Answer(content='<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ),
    Case("an empty object", "<tool_call>{}</tool_call>", Answer(content="<tool_call>{}</tool_call>")),
    Case(
        "prose that mentions the marker, and goes on for long",
        "A <tool_call> is how I call. " + "It has more. " * 9,
        Answer(content="A <tool_call> is how I call. " + "It has more. " * 9),
    ),
    Case(
        "a good call after a bad one",
        '<tool_call>{"name": "fly"}</tool_call><tool_call>{"name": "ping"}</tool_call>',
        Answer(content='<tool_call>{"name": "fly"}</tool_call>', calls=(PING,)),
    ),
    Case(
        "text between calls",
        '<tool_call>{"name": "ping"}</tool_call>\nand\n<tool_call>{"name": "ping"}</tool_call>',
        Answer(content="\nand\n", calls=(PING, PING)),
    ),
    Case("the block's end left out", '<tool_call>{"name": "ping", "arguments": {}}', Answer(calls=(PING,))),
    Case(
        "cut in the name", '<tool_call>\n{"name": "get_wea', Answer(content='<tool_call>\n{"name": "get_wea'), cut=True
    ),
    Case("cut after the name", '<tool_call>\n{"name": "ping"', Answer(calls=(PING,)), cut=True),
    Case(
        "cut in a key",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "da',
        Answer(content='"da', calls=(("get_weather", {"city": "Oslo"}),)),
        cut=True,
    ),
    Case(
        "cut in a string",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Os',
        Answer(calls=(("get_weather", {"city": "Os"}),)),
        cut=True,
    ),
    Case(
        "cut in an escape",
        '<tool_call>{"name": "write", "arguments": {"text": "a\\u00',
        Answer(calls=(("write", {"text": "a\\u00"}),)),
        cut=True,
    ),
    Case(
        "cut in a number",
        '<tool_call>{"name": "get_weather", "arguments": {"days": 1',
        Answer(calls=(("get_weather", {"days": 1}),)),
        cut=True,
    ),
    Case(
        "cut in a literal",
        '<tool_call>{"name": "search", "arguments": {"query": "q", "exact": tr',
        Answer(content='"exact": tr', calls=(("search", {"query": "q"}),)),
        cut=True,
    ),
    Case(
        "cut in a list",
        '<tool_call>{"name": "search", "arguments": {"tags": ["a", "b", ',
        Answer(calls=(("search", {"tags": ["a", "b"]}),)),
        cut=True,
    ),
    Case(
        "cut in the block's end",
        '<tool_call>{"name": "ping", "arguments": {}}\n</tool',
        Answer(calls=(PING,)),
        cut=True,
    ),
    Case(
        "too deep to be meant",
        '<tool_call>{"name": "ping", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
        Answer(content="[" * 101 + "]" * 200 + "}}", calls=(("ping", {"a": DEEP}),)),
    ),
    Case(
        "another name of the block", '<TOOLCALL>[{"name": "ping", "arguments": {}}]</TOOLCALL>', Answer(calls=(PING,))
    ),
)

LLAMA = (
    Case(
        "a call, then another",
        '{"name": "ping", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
        Answer(calls=(PING, OSLO)),
    ),
    Case(
        "calls on lines of their own",
        '{"name": "ping", "parameters": {}}\n{"name": "ping", "parameters": {}}',
        Answer(calls=(PING, PING)),
    ),
    Case("with the tag", '<|python_tag|>{"name": "ping", "parameters": {}}', Answer(calls=(PING,))),
    Case("the type first", '{"type": "function", "name": "ping", "parameters": {}}', Answer(calls=(PING,))),
    Case(
        "arguments first", '{"parameters": {"city": "Oslo", "days": 2}, "name": "get_weather"}', Answer(calls=(OSLO,))
    ),
    Case("an answer in JSON", '{"answer": 42, "name": "ping"}', Answer(content='{"answer": 42, "name": "ping"}')),
    Case("an answer about somebody", '{"name": "Bob", "age": 3}', Answer(content='{"name": "Bob", "age": 3}')),
    Case("an answer that is a list", '[{"name": "ping"}]', Answer(content='[{"name": "ping"}]')),
    Case(
        "an object later on",
        'So: {"name": "ping", "parameters": {}}',
        Answer(content='So: {"name": "ping", "parameters": {}}'),
    ),
    Case("code after the tag", "<|python_tag|>print(1)", Answer(content="<|python_tag|>print(1)")),
    Case("text after the call", '{"name": "ping", "parameters": {}} ok', Answer(content=" ok", calls=(PING,))),
    Case("text after the separator", '{"name": "ping", "parameters": {}}; ok', Answer(content="; ok", calls=(PING,))),
    Case("no parameters", '{"name": "ping"}', Answer(calls=(PING,))),
    Case("whitespace first", '\n {"name": "ping"}', Answer(calls=(PING,))),
    Case(
        "cut in the parameters",
        '{"name": "get_weather", "parameters": {"city": "O',
        Answer(calls=(("get_weather", {"city": "O"}),)),
        cut=True,
    ),
    Case("cut in the name", '{"name": "get', Answer(content='{"name": "get'), cut=True),
    Case("a brace", "{", Answer(content="{")),
)

MISTRAL = (
    Case("without the second marker", '[TOOL_CALLS]get_weather{"city": "Oslo", "days": 2}', Answer(calls=(OSLO,))),
    Case(
        "with an id",
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo", "days": 2}',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "the older list",
        '[TOOL_CALLS][{"name": "ping", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
        Answer(calls=(PING, OSLO)),
    ),
    Case("the older list, spaced", '[TOOL_CALLS] [{"name": "ping", "arguments": {}}]', Answer(calls=(PING,))),
    Case("one object", '[TOOL_CALLS]{"name": "ping", "arguments": {}}', Answer(calls=(PING,))),
    Case(
        "the marker in a value",
        '[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]ping[ARGS]{}"}',
        Answer(calls=(("write", {"text": "[TOOL_CALLS]ping[ARGS]{}"}),)),
    ),
    Case("reasoning in words", "<think>so</think>x", Answer(reasoning="so", content="x")),
    Case("reasoning after words", "x[THINK]so[/THINK]y", Answer(reasoning="so", content="xy")),
    Case("a name without arguments", "[TOOL_CALLS]ping", Answer(content="[TOOL_CALLS]ping")),
    Case("malformed arguments", '[TOOL_CALLS]ping[ARGS]{"a" 1}', Answer(content='"a" 1}', calls=(PING,))),
    Case(
        "cut in the arguments",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "O',
        Answer(calls=(("get_weather", {"city": "O"}),)),
        cut=True,
    ),
)

LISTS = (
    Case(
        "the answer in markers",
        "<think>so</think><response>yes</response>",
        Answer(reasoning="so", content="yes"),
    ),
    Case("an answer's marker without reasoning", "<response>yes", Answer(content="<response>yes")),
    Case("a space after the marker", '<|tool_call|> [{"name": "ping", "arguments": {}}]', Answer(calls=(PING,))),
    Case(
        "text after the list",
        '<|tool_call|>[{"name": "ping", "arguments": {}}] ok',
        Answer(content=" ok", calls=(PING,)),
    ),
    Case("an empty list", "<|tool_call|>[]", Answer(content="<|tool_call|>[]")),
    Case(
        "the second is not offered",
        '<|tool_call|>[{"name": "ping", "arguments": {}}, {"name": "fly", "arguments": {}}]',
        Answer(content=', {"name": "fly", "arguments": {}}]', calls=(PING,)),
    ),
    Case(
        "cut in the second",
        '<|tool_call|>[{"name": "ping", "arguments": {}}, {"name": "pi',
        Answer(content=', {"name": "pi', calls=(PING,)),
        cut=True,
    ),
    Case("the older marker", '<tool_call>[{"name": "ping", "arguments": {}}]', Answer(calls=(PING,))),
)

PHI = (
    Case(
        "the word in prose",
        "import functools\nfunctools.reduce(f, [1])",
        Answer(content="import functools\nfunctools.reduce(f, [1])"),
    ),
    Case("the word and a list", "functools[1]", Answer(content="functools[1]")),
    Case("the special token", '<|tool_call|>[{"name": "ping", "arguments": {}}]<|/tool_call|>', Answer(calls=(PING,))),
    Case(
        "text after the list", 'functools[{"name": "ping", "arguments": {}}] ok', Answer(content=" ok", calls=(PING,))
    ),
    Case("the word cut", "functo", Answer(content="functo"), cut=True),
)

KIMI = (
    Case(
        "an id that isn't native",
        "<|tool_calls_section_begin|><|tool_call_begin|>call_abc<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        Answer(
            content="<|tool_calls_section_begin|><|tool_call_begin|>call_abc<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    Case(
        "whitespace in the head",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|> functions.ping:3\n<|tool_call_argument_begin|> {} <|tool_call_end|>\n<|tool_calls_section_end|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "no prefix",
        "<|tool_calls_section_begin|><|tool_call_begin|>ping:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "empty arguments",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "text after the section",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>\nDone",
        Answer(content="\nDone", calls=(PING,)),
    ),
    Case(
        "a call without its section",
        "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "malformed arguments, then a good call",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{"a": }<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
        Answer(content='"a": }', calls=(PING, PING)),
    ),
    Case(
        "cut in the id",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.pi",
        Answer(content="<|tool_calls_section_begin|><|tool_call_begin|>functions.pi"),
        cut=True,
    ),
)

DEEPSEEK = (
    Case(
        "no fence",
        'x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{"city": "Oslo", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Answer(content="x", calls=(OSLO,)),
    ),
    Case(
        "a fence in a value",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{"text": "```\\n<｜tool▁call▁end｜>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        Answer(calls=(("write", {"text": "```\n<｜tool▁call▁end｜>"}),)),
    ),
    Case(
        "the section's end left out",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜>",
        Answer(calls=(PING,)),
    ),
    Case(
        "cut in the fence",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```js",
        Answer(calls=(PING,)),
        cut=True,
    ),
    Case(
        "words for arguments",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\nplease<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer(
            content="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\nplease<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
)
