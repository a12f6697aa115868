"""LiteLLM's SDK: completion, streams, reasoning, tools, structured output, its own exceptions, retries."""

from __future__ import annotations

import json
from typing import Any

import litellm
from facts import ASLEEP, CITY, KEY, MODEL, NO_WAIT, URL, WRONG_KEY, raises
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def ask(text: str, **fields: Any) -> Any:
    asked = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "max_retries": 0, **fields}
    return litellm.completion(messages=[{"role": "user", "content": text}], **asked)


assert ask("hi").choices[0].message.content == "Hello, world."
chunks = list(ask("hi", stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world."
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 4
assert ask("think").choices[0].message.reasoning_content.strip() == "Two and two are four."

weather = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
for stream in (False, True):
    told = ask("weather in Paris", tools=[weather], stream=stream)
    told = litellm.stream_chunk_builder(list(told)) if stream else told
    (call,) = told.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert told.choices[0].finish_reason == "tool_calls"

told = ask("Who is Ada?", response_format=Person)
assert Person.model_validate_json(told.choices[0].message.content) == Person(name="Ada", age=36)
vectors = litellm.embedding(model="openai/embedder", api_base=URL, api_key=KEY, input=["one", "two"]).data
assert len(vectors) == 2

raises(litellm.AuthenticationError, lambda: ask("hi", api_key=WRONG_KEY))
raises(litellm.NotFoundError, lambda: ask("hi", model="openai/nobody"))
raises(litellm.ContextWindowExceededError, lambda: ask("word " * 300_000))
assert "temperature" in str(raises(litellm.BadRequestError, lambda: ask("hi", temperature=9)))
assert ask("hi", model=f"openai/{ASLEEP}", extra_headers=NO_WAIT, max_retries=5).model == ASLEEP
