"""OpenAI's SDK for Python, of two major versions: chat, streams, tools, structured output, errors, retries, cancel."""

from __future__ import annotations

import json
from typing import Any

import openai
from facts import ASLEEP, CITY, KEY, MODEL, NO_WAIT, URL, WRONG_KEY, raises
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY)


def ask(text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **fields)


class Person(BaseModel):
    name: str
    age: int


assert ask("hi").choices[0].message.content == "Hello, world."
chunks = list(ask("hi", stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world."
assert chunks[-1].usage.completion_tokens == 4

thought = ask("think").choices[0].message
assert (thought.content, thought.reasoning_content) == ("Four.", "Two and two are four.")

weather: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
with client.chat.completions.stream(
    model=MODEL, messages=[{"role": "user", "content": "weather in Paris"}], tools=[weather]
) as stream:
    final = stream.get_final_completion().choices[0]
(call,) = final.message.tool_calls or []
assert json.loads(call.function.arguments) == {"city": "Paris"}
assert final.finish_reason == "tool_calls"

parsed = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": "Who is Ada?"}], response_format=Person
)
assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)

vectors = client.embeddings.create(model="embedder", input=["one", "two"]).data
assert len(vectors) == 2
assert abs(sum(value * value for value in vectors[0].embedding) - 1) < 1e-3

assert raises(openai.AuthenticationError, client.with_options(api_key=WRONG_KEY).models.list).code == "invalid_api_key"
assert raises(openai.NotFoundError, lambda: client.models.retrieve("nobody")).code == "model_not_found"
assert raises(openai.BadRequestError, lambda: ask("hi", temperature=9)).param == "temperature"
assert "error here" in str(raises(openai.APIError, lambda: list(ask("breaks off", stream=True))))

once = client.with_options(max_retries=0, default_headers=NO_WAIT)
told = raises(
    openai.InternalServerError,
    lambda: once.chat.completions.create(model=ASLEEP, messages=[{"role": "user", "content": "hi"}]),
)
assert (told.status_code, told.code) == (503, "model_loading")
again = client.with_options(max_retries=5, default_headers=NO_WAIT)
assert again.chat.completions.create(model=ASLEEP, messages=[{"role": "user", "content": "hi"}]).model == ASLEEP

for _ in range(8):  # more often than there are slots
    endless = ask("endless", stream=True)
    next(iter(endless))
    endless.close()
assert ask("hi").choices[0].finish_reason == "stop"
print(openai.__version__)
