"""Cases of the formats whose arguments are tagged text: Qwen's XML, DeepSeek's DSML, GLM, MiniMax."""

# ruff: noqa: E501 - a raw output stays in one piece

from __future__ import annotations

from tests.text.harness import Answer, Case

OSLO = ("get_weather", {"city": "Oslo", "days": 2})
PING = ("ping", {})

QWEN = (
    Case(
        "a block without its wrapper",
        "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
        Answer(calls=(("get_weather", {"city": "Oslo"}),)),
    ),
    Case(
        "two functions in one block",
        "<tool_call>\n<function=ping>\n</function>\n<function=ping>\n</function>\n</tool_call>",
        Answer(calls=(PING, PING)),
    ),
    Case(
        "no line breaks at all",
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter><parameter=days>2</parameter></function></tool_call>",
        Answer(calls=(OSLO,)),
    ),
    Case(
        "only one line break on each side is the frame's",
        "<tool_call>\n<function=write>\n<parameter=text>\n\n  a\n\n</parameter>\n</function>\n</tool_call>",
        Answer(calls=(("write", {"text": "\n  a\n"}),)),
    ),
    Case(
        "a value that ends the parameter, and goes on",
        "<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\nb </parameter></function> c\n</parameter>\n</function>\n</tool_call>",
        Answer(calls=(("write", {"text": "a\n</parameter>\nb </parameter></function> c"}),)),
    ),
    Case(
        "a value that ends the function, and goes on",
        "<tool_call>\n<function=write>\n<parameter=text>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>",
        Answer(calls=(("write", {"text": "</function>\n</tool_call>"}),)),
    ),
    Case(
        "a parameter without a name",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=\n7\n</parameter>\n</function>\n</tool_call>",
        Answer(content="<parameter=\n7\n</parameter>\n\n", calls=(("get_weather", {"city": "Oslo"}),)),
    ),
    Case(
        "a header that never closes",
        "<tool_call>\n<function=write>\n<parameter=text: ls\n</parameter>\n</function>\n</tool_call>",
        Answer(content="<parameter=text: ls\n</parameter>\n\n", calls=(("write", {}),)),
    ),
    Case(
        "words where a parameter should be",
        "<tool_call>\n<function=ping>\nnow please\n</function>\n</tool_call>",
        Answer(content="<tool_call>\n<function=ping>\nnow please\n</function>\n</tool_call>"),
    ),
    Case(
        "words after a parameter",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function> so\n</tool_call>",
        Answer(calls=(("get_weather", {"city": "Oslo\n</parameter>\n</function> so\n</tool_call>"}),)),
    ),
    Case(
        "the function's end left out",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>",
        Answer(calls=(("get_weather", {"city": "Oslo"}),)),
    ),
    Case(
        "the block's end left out",
        "<tool_call>\n<function=ping>\n</function>",
        Answer(calls=(PING,)),
    ),
    Case("prose about a function", "Use <function=ping> for that.", Answer(content="Use <function=ping> for that.")),
    Case(
        "numbers of every spelling",
        "<function=search><parameter=limit>+07</parameter><parameter=score>.5</parameter><parameter=exact>True</parameter></function>",
        Answer(calls=(("search", {"limit": 7, "score": 0.5, "exact": True}),)),
    ),
    Case(
        "values that aren't of their type",
        "<function=search><parameter=limit>few</parameter><parameter=score>nan</parameter><parameter=exact>maybe</parameter><parameter=tags>[a</parameter></function>",
        Answer(calls=(("search", {"limit": "few", "score": "nan", "exact": "maybe", "tags": "[a"}),)),
    ),
    Case(
        "an object with slips of Python",
        "<function=search><parameter=where>{'lat': 1, 'name': 'it\\'s', 'zoom': None,}</parameter></function>",
        Answer(calls=(("search", {"where": {"lat": 1, "name": "it's", "zoom": None}}),)),
    ),
    Case(
        "string or number, told by the text",
        "<function=search><parameter=key>12</parameter><parameter=note>null</parameter><parameter=limit>null</parameter></function>",
        Answer(calls=(("search", {"key": 12, "note": None, "limit": None}),)),
    ),
    Case(
        "string or number, and it's a string",
        "<function=search><parameter=key>12b</parameter><parameter=note>nullable</parameter></function>",
        Answer(calls=(("search", {"key": "12b", "note": "nullable"}),)),
    ),
    Case(
        "an empty value",
        "<function=write><parameter=text></parameter><parameter=path>\n</parameter></function>",
        Answer(calls=(("write", {"text": "", "path": ""}),)),
    ),
    Case(
        "a call written as an object",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "cut in a text",
        "<tool_call>\n<function=write>\n<parameter=text>\nls -l",
        Answer(calls=(("write", {"text": "ls -l"}),)),
        cut=True,
    ),
    Case(
        "cut in the marker after a text",
        "<tool_call>\n<function=write>\n<parameter=text>\nls -l\n</para",
        Answer(calls=(("write", {"text": "ls -l"}),)),
        cut=True,
    ),
    Case(
        "cut in a number",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1",
        Answer(calls=(("get_weather", {"days": 1}),)),
        cut=True,
    ),
    Case(
        "cut in an object",
        '<function=search><parameter=where>{"lat": 1, "na',
        Answer(content='"na', calls=(("search", {"where": {"lat": 1}}),)),
        cut=True,
    ),
    Case(
        "cut in a parameter's name",
        "<tool_call>\n<function=get_weather>\n<parameter=ci",
        Answer(content="<parameter=ci", calls=(("get_weather", {}),)),
        cut=True,
    ),
    Case("cut after the name", "<tool_call>\n<function=get_weather>\n", Answer(calls=(("get_weather", {}),)), cut=True),
    Case(
        "cut in the name", "<tool_call>\n<function=get_wea", Answer(content="<tool_call>\n<function=get_wea"), cut=True
    ),
    Case("stopped after the name", "Try <function=ping>", Answer(content="Try <function=ping>")),
    Case(
        "reasoning that is never closed",
        "<think>\nso\n\n",
        Answer(reasoning="so\n\n"),
        cut=True,
    ),
    Case("reasoning opened twice", "<think>\nso</think>x", Answer(reasoning="so", content="x"), thinking=True),
    Case("reasoning's end at the start", "\n</think>\n\nx", Answer(content="x")),
    Case("reasoning's end in the midst", "x </think> y", Answer(content="x </think> y")),
    Case("reasoning's start in the midst", "x <think> y", Answer(content="x <think> y")),
    Case("another name for reasoning", "<seed:think>so</seed:think>x", Answer(reasoning="so", content="x")),
    Case(
        "whitespace between calls, and after the last",
        "<tool_call><function=ping></function></tool_call> \n\n<tool_call><function=ping></function></tool_call>\n",
        Answer(calls=(PING, PING)),
    ),
    Case(
        "whitespace before the first call",
        "\n\n<tool_call><function=ping></function></tool_call>",
        Answer(calls=(PING,)),
    ),
    Case(
        "a broken call, then a good one",
        "<tool_call><function=write><parameter=path>a</parameter><parameter=\n</function></tool_call><tool_call><function=ping></function></tool_call>",
        Answer(content="<parameter=\n", calls=(("write", {"path": "a"}), PING)),
    ),
)

DSML = (
    Case(
        "what the model says of a type counts where the schema is silent",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="ping"><｜DSML｜parameter name="a" string="false">[1, null]</｜DSML｜parameter><｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        Answer(calls=(("ping", {"a": [1, None], "b": "2"}),)),
    ),
    Case(
        "the attribute left out",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days">2</｜DSML｜parameter><｜DSML｜parameter name="city">Oslo</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
        Answer(calls=(("get_weather", {"days": 2, "city": "Oslo"}),)),
    ),
    Case(
        "another name of the block",
        '<｜DSML｜toolcalls>\n<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜toolcalls>',
        Answer(calls=(PING,)),
    ),
    Case(
        "a call without its block",
        '<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>',
        Answer(calls=(PING,)),
    ),
    Case(
        "the second of three was not offered",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="ping"></｜DSML｜invoke><｜DSML｜invoke name="fly"></｜DSML｜invoke><｜DSML｜invoke name="ping"></｜DSML｜invoke></｜DSML｜tool_calls>',
        Answer(content='<｜DSML｜invoke name="fly"></｜DSML｜invoke>', calls=(PING, PING)),
    ),
    Case(
        "cut in a value",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">ab</｜DS',
        Answer(calls=(("write", {"text": "ab"}),)),
        cut=True,
    ),
    Case(
        "a parameter that can't be read",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="ping"><｜DSML｜parameter name=x></｜DSML｜invoke></｜DSML｜tool_calls>',
        Answer(
            content='<｜DSML｜tool_calls><｜DSML｜invoke name="ping"><｜DSML｜parameter name=x></｜DSML｜invoke></｜DSML｜tool_calls>'
        ),
    ),
)

GLM = (
    Case(
        "everything on one line",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        Answer(calls=(OSLO,)),
    ),
    Case("a name and nothing more", "<tool_call>ping</tool_call>", Answer(calls=(PING,))),
    Case("a line break before the name", "<tool_call>\nping\n</tool_call>", Answer(calls=(PING,))),
    Case(
        "a value that ends the value, and goes on",
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value> b</arg_value>\n</tool_call>",
        Answer(calls=(("write", {"text": "a</arg_value> b"}),)),
    ),
    Case(
        "line breaks belong to the value",
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>\na\n</arg_value>\n</tool_call>",
        Answer(calls=(("write", {"text": "\na\n"}),)),
    ),
    Case(
        "a key without a value",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_key>days</arg_key></tool_call>",
        Answer(content="<arg_key>city</arg_key>\n<arg_key>days</arg_key>", calls=(("get_weather", {}),)),
    ),
    Case(
        "a sentence in the frame",
        "<tool_call>I would not</tool_call>",
        Answer(content="<tool_call>I would not</tool_call>"),
    ),
    Case("cut after the name", "<tool_call>ping", Answer(content="<tool_call>ping"), cut=True),
    Case(
        "cut in a key",
        "<tool_call>get_weather\n<arg_key>ci",
        Answer(content="<arg_key>ci", calls=(("get_weather", {}),)),
        cut=True,
    ),
    Case("closed at the start", "</think>Hi", Answer(content="Hi")),
)

MINIMAX = (
    Case(
        "two calls, one without arguments",
        '<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        Answer(calls=(PING, OSLO)),
    ),
    Case(
        "a value that ends the call, and goes on",
        '<minimax:tool_call><invoke name="write"><parameter name="text"></parameter></invoke>!</parameter></invoke></minimax:tool_call>',
        Answer(calls=(("write", {"text": "</parameter></invoke>!"}),)),
    ),
    Case("the name in other quotes", "<invoke name='ping'></invoke>", Answer(content="<invoke name='ping'></invoke>")),
    Case(
        "cut in an object",
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="tags">["a", "b',
        Answer(calls=(("search", {"tags": ["a", "b"]}),)),
        cut=True,
    ),
    Case(
        "cut in a list's number",
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="where">{"lat": 1.',
        Answer(calls=(("search", {"where": {"lat": 1.0}}),)),
        cut=True,
    ),
)
