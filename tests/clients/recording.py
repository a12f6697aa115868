"""What the replay model says to each client's script: the first line that fits the last message is played."""

from __future__ import annotations

import json
from typing import Any


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


QUOTED = """\
greet.py
```
def greet(name: str) -> str:
    return f"Good day, {name}!"
```
"""
"""A file as aider's format `whole` has it."""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Norway": "Oslo", "Peru": "Lima"}

LINES: list[dict[str, Any]] = [
    {"when": "rewrite greet.py", "pieces": ["Here it is.\n\n", QUOTED[:30], QUOTED[30:]]},
    {"when": "weather in Paris", "pieces": ["I will look.\n", call("get_weather", city="Paris")]},
    {"when": "18 degrees", "pieces": [call("to_fahrenheit", celsius=18)]},
    {"when": "64.4", "pieces": ["It is 64.4", " degrees Fahrenheit", " in Paris."]},
    {"when": "Ada", "pieces": ['{"name": "Ada", ', '"age": 36}']},
    {"when": "think", "pieces": ["Two and two", " are four.\n", "</think>\n\n", "Four", "."], "reasoning_open": True},
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 2},
    {"when": "breaks off", "pieces": ["One", " two"], "fail": "error", "after": 1},
    *({"when": f"capital of {country}", "pieces": ["It is ", town, "."]} for country, town in CAPITALS.items()),
    {"pieces": ["Hello", ", ", "world", "."]},
]
