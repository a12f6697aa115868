"""Cases of the formats with notations of their own: Python, Gemma, harmony; and of the one without calls."""

# ruff: noqa: E501 - a raw output stays in one piece

from __future__ import annotations

from tests.text.harness import Answer, Case

OSLO = ("get_weather", {"city": "Oslo", "days": 2})
PING = ("ping", {})

PYTHONIC = (
    Case(
        "both quotes", "[write(path='a\"b', text=\"c'd\")]", Answer(calls=(("write", {"path": 'a"b', "text": "c'd"}),))
    ),
    Case(
        "words of Python",
        "[search(exact=True, limit=None, score=-1.5)]",
        Answer(calls=(("search", {"exact": True, "limit": None, "score": -1.5}),)),
    ),
    Case(
        "spaces and line breaks",
        "[\n  get_weather( city = 'Oslo' , days=2 ) ,\n  ping()\n]",
        Answer(calls=(OSLO, PING)),
    ),
    Case("between its markers", "<|python_start|>[ping()]<|python_end|>", Answer(calls=(PING,))),
    Case("between other markers", "<|tool_call_start|>[ping()]<|tool_call_end|>", Answer(calls=(PING,))),
    Case("a list that is an answer", "[1, 2, 3]", Answer(content="[1, 2, 3]")),
    Case("a link that begins an answer", "[ping](http://x)", Answer(content="[ping](http://x)")),
    Case("a list later on", "So: [ping()]", Answer(content="So: [ping()]")),
    Case(
        "an argument without a name", "[get_weather('Oslo')]", Answer(content="'Oslo')]", calls=(("get_weather", {}),))
    ),
    Case(
        "a name for a value",
        "[get_weather(city=oslo, days=2)]",
        Answer(content="city=oslo, days=2)]", calls=(("get_weather", {}),)),
    ),
    Case(
        "brackets and a call in a string",
        "[write(text=')] [ping()]')]",
        Answer(calls=(("write", {"text": ")] [ping()]"}),)),
    ),
    Case("escapes", "[write(text='\\x41\\u00e9\\'\\n\\\\')]", Answer(calls=(("write", {"text": "Aé'\n\\"}),))),
    Case("text after the list", "[ping()] ok", Answer(content=" ok", calls=(PING,))),
    Case("cut in a string", "[write(text='ab", Answer(calls=(("write", {"text": "ab"}),)), cut=True),
    Case(
        "cut in an argument's name",
        "[get_weather(city='Oslo', da",
        Answer(content="da", calls=(("get_weather", {"city": "Oslo"}),)),
        cut=True,
    ),
    Case("cut in the name", "[get_wea", Answer(content="[get_wea"), cut=True),
)

GEMMA = (
    Case(
        "a simple word without marks",
        "<|tool_call>call:get_weather{city:Oslo,days:2}<tool_call|>",
        Answer(calls=(OSLO,)),
    ),
    Case(
        "marked keys",
        '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>Oslo<|"|>,days:2}<tool_call|>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "whitespace in the arguments",
        '<|tool_call>call:get_weather{ city : <|"|>Oslo<|"|> , days : 2 }<tool_call|>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "quotes and braces in a string",
        '<|tool_call>call:write{text:<|"|>{"a": [1]} <|" \\n<|"|>}<tool_call|>',
        Answer(calls=(("write", {"text": '{"a": [1]} <|" \\n'}),)),
    ),
    Case("empty reasoning, no line break", "<|channel>thought\n<channel|>Hi", Answer(content="Hi")),
    Case(
        "reasoning after a call",
        "<|tool_call>call:ping{}<tool_call|><|channel>thought\nso<channel|>ok",
        Answer(reasoning="so", content="ok", calls=(PING,)),
    ),
    Case("an end of reasoning in the midst", "a <channel|> b", Answer(content="a <channel|> b")),
    Case(
        "two words without marks",
        "<|tool_call>call:write{text:New York}<tool_call|>",
        Answer(content="York}", calls=(("write", {"text": "New"}),)),
    ),
    Case(
        "cut in a string", '<|tool_call>call:write{text:<|"|>ab<|', Answer(calls=(("write", {"text": "ab"}),)), cut=True
    ),
    Case("cut in a key", "<|tool_call>call:write{te", Answer(content="te", calls=(("write", {}),)), cut=True),
    Case("no call at all", "<|tool_call>ping<tool_call|>", Answer(content="<|tool_call>ping<tool_call|>")),
)

FUNCTIONGEMMA = (
    Case(
        "everything in marks",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:<escape>2<escape>}<end_function_call>",
        Answer(calls=(OSLO,)),
    ),
    Case(
        "one mark too few",
        "<start_function_call>call:write{text:<escape>ab}<end_function_call>",
        Answer(calls=(("write", {"text": "ab}<end_function_call>"}),)),
    ),
    Case(
        "two calls side by side",
        "<start_function_call>call:ping{}<end_function_call><start_function_call>call:ping{}<end_function_call>",
        Answer(calls=(PING, PING)),
    ),
    Case("cut in the name", "<start_function_call>call:pi", Answer(content="<start_function_call>call:pi"), cut=True),
)

HARMONY = (
    Case(
        "the recipient before the channel",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 2}<|call|>',
        Answer(calls=(OSLO,)),
    ),
    Case(
        "the recipient before the channel, later",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.ping<|channel|>commentary<|message|>{}<|call|>",
        Answer(reasoning="so", calls=(PING,)),
    ),
    Case(
        "the end of the call not written",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}',
        Answer(calls=(OSLO,)),
    ),
    Case("no prefix of the name", "<|channel|>commentary to=ping<|message|>{}<|call|>", Answer(calls=(PING,))),
    Case(
        "a call in the analysis channel",
        "<|channel|>analysis to=functions.ping<|message|>{}<|call|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "words to the user in between",
        "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>Now.<|return|>",
        Answer(content="Wait.Now."),
    ),
    Case(
        "two thoughts",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
        Answer(reasoning="ab", content="c"),
    ),
    Case("an answer without a header", "Hello", Answer(content="Hello")),
    Case("a message without a channel", "<|start|>assistant<|message|>Hello<|end|>", Answer(content="Hello")),
    Case(
        "another's message",
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
        Answer(content="a<|start|>user<|message|>b"),
    ),
    Case("an unknown channel", "<|channel|>dreams<|message|>a<|end|>", Answer(content="<|channel|>dreams<|message|>a")),
    Case("a header that doesn't end", "<|channel|>final and so on", Answer(content="<|channel|>final and so on")),
    Case("a header that ends too soon", "<|channel|>final<|end|>x", Answer(content="<|channel|>finalx")),
    Case("words that look like a recipient", "I go to=functions.ping", Answer(content="I go to=functions.ping")),
    Case("a recipient and nothing more", " to=functions.ping", Answer(content=" to=functions.ping")),
    Case(
        "extra words in the header",
        "<|channel|>commentary to=functions.ping code<|constrain|>json<|message|>{}<|call|>",
        Answer(calls=(PING,)),
    ),
    Case(
        "malformed arguments",
        "<|channel|>commentary to=functions.ping<|message|>{oops}<|call|>",
        Answer(content="oops}", calls=(PING,)),
    ),
    Case(
        "words for arguments",
        "<|channel|>commentary to=functions.ping<|message|>please<|call|>",
        Answer(content="please", calls=(PING,)),
    ),
    Case(
        "text after the arguments",
        "<|channel|>commentary to=functions.ping<|message|>{} ok<|call|>",
        Answer(content=" ok", calls=(PING,)),
    ),
    Case(
        "cut in the header",
        "<|channel|>commentary to=functions.pi",
        Answer(content="<|channel|>commentary to=functions.pi"),
        cut=True,
    ),
    Case(
        "cut in the arguments",
        '<|channel|>commentary to=functions.write<|message|>{"text": "a',
        Answer(calls=(("write", {"text": "a"}),)),
        cut=True,
    ),
    Case("cut in reasoning", "<|channel|>analysis<|message|>so\n", Answer(reasoning="so\n"), cut=True),
)

PLAIN = (
    Case("words", "Hello <b>you</b>", Answer(content="Hello <b>you</b>")),
    Case("reasoning", "<think>\nso\n</think>\n\nyes", Answer(reasoning="so", content="yes")),
    Case("reasoning without line breaks", "<think>so</think>yes", Answer(reasoning="so", content="yes")),
    Case("whitespace first", " \n<think>so</think>yes", Answer(reasoning="so", content="yes")),
    Case("line breaks inside", "<think>\n\na\n\n\nb\n\n</think>c", Answer(reasoning="a\n\n\nb", content="c")),
    Case("spaces are no line breaks", "<think> a </think> b ", Answer(reasoning=" a ", content=" b ")),
    Case("indented content", "<think>a</think>\n\n    b", Answer(reasoning="a", content="    b")),
    Case("line breaks in content", "<think>a</think>\nb\n\n", Answer(reasoning="a", content="b\n\n")),
    Case("empty", "<think></think>a", Answer(content="a")),
    Case("empty, with line breaks", "<think>\n\n</think>\n\na", Answer(content="a")),
    Case("never closed", "<think>a", Answer(reasoning="a")),
    Case("never closed, cut", "<think>a\n</th", Answer(reasoning="a\n</th"), cut=True),
    Case("opened by the prompt", "a</think>b", Answer(reasoning="a", content="b"), thinking=True),
    Case(
        "opened by the prompt, with line breaks",
        "\na\n</think>\n\nb",
        Answer(reasoning="a", content="b"),
        thinking=True,
    ),
    Case("opened by the prompt, and again", "<think>\na</think>b", Answer(reasoning="a", content="b"), thinking=True),
    Case("opened by the prompt, closed at once", "</think>b", Answer(content="b"), thinking=True),
    Case("opened by the prompt, never closed", "a <think> b", Answer(reasoning="a <think> b"), thinking=True),
    Case("closed at the start", "</think>\n\nb", Answer(content="b")),
    Case("closed in the midst", "a</think>b", Answer(content="a</think>b")),
    Case("closed twice", "<think>a</think>b</think>c", Answer(reasoning="a", content="b</think>c")),
    Case("opened in the midst", "a<think>b</think>c", Answer(content="a<think>b</think>c")),
    Case("opened again", "<think>a</think>b<think>c", Answer(reasoning="a", content="b<think>c")),
    Case("look-alikes", "<thinks> </thin <thing>", Answer(content="<thinks> </thin <thing>")),
    Case("a look-alike in reasoning", "<think>a </thin> b</think>c", Answer(reasoning="a </thin> b", content="c")),
    Case(
        "markers of calls",
        '<tool_call>{"name": "ping"}</tool_call>',
        Answer(content='<tool_call>{"name": "ping"}</tool_call>'),
    ),
    Case("unicode", "<think>é\u0301😀</think>日本\u2028", Answer(reasoning="é\u0301😀", content="日本\u2028")),
    Case("only whitespace", " \n ", Answer(content=" \n ")),
    Case("only a line break after reasoning", "<think>a</think>\n", Answer(reasoning="a")),
    Case("nothing", "", Answer()),
    Case("cut in the opening marker", "<thi", Answer(content="<thi"), cut=True),
)
