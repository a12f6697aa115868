"""Anthropic's SDK for Python: messages, streams, tools and their results, errors, retries, cancel."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from facts import ASLEEP, CITY, KEY, MODEL, NO_WAIT, ROOT, WRONG_KEY, raises

client = Anthropic(base_url=ROOT, api_key=KEY)
HELLO: Any = {"model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: Any = {"name": "get_weather", "description": "of a city", "input_schema": CITY}
FAHRENHEIT: Any = {
    "name": "to_fahrenheit",
    "input_schema": {"type": "object", "properties": {"celsius": {"type": "number"}}},
}


def ask(text: str, **fields: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 2000, "messages": [{"role": "user", "content": text}], **fields}
    return client.messages.create(**asked)


assert [block.text for block in ask("hi").content] == ["Hello, world."]
with client.messages.stream(model=MODEL, max_tokens=99, messages=[{"role": "user", "content": "hi"}]) as stream:
    assert "".join(stream.text_stream) == "Hello, world."
    assert stream.get_final_message().usage.output_tokens == 4

thought = ask("think", thinking={"type": "enabled", "budget_tokens": 1024}).content
assert [block.type for block in thought] == ["thinking", "text"]

messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
results = {"get_weather": "18 degrees", "to_fahrenheit": "64.4"}
called = []
while True:
    turn = ask("", messages=messages, tools=[WEATHER, FAHRENHEIT])
    messages.append({"role": "assistant", "content": turn.content})
    uses = [block for block in turn.content if block.type == "tool_use"]
    if not uses:
        break
    called += [use.name for use in uses]
    answers = [{"type": "tool_result", "tool_use_id": use.id, "content": results[use.name]} for use in uses]
    messages.append({"role": "user", "content": answers})
assert called == ["get_weather", "to_fahrenheit"]
assert turn.content[0].text == "It is 64.4 degrees Fahrenheit in Paris."

raises(anthropic.AuthenticationError, lambda: client.with_options(api_key=WRONG_KEY).messages.create(**HELLO))
raises(anthropic.NotFoundError, lambda: ask("hi", model="nobody"))
assert "temperature" in str(raises(anthropic.BadRequestError, lambda: ask("hi", extra_body={"temperature": 9})))

again = client.with_options(max_retries=5, default_headers=NO_WAIT)
assert again.messages.create(model=ASLEEP, max_tokens=9, messages=[{"role": "user", "content": "hi"}]).model == ASLEEP

for _ in range(8):  # more often than there are slots
    with client.messages.stream(
        model=MODEL, max_tokens=9999, messages=[{"role": "user", "content": "endless"}]
    ) as stream:
        next(iter(stream.text_stream))
assert ask("hi").stop_reason == "end_turn"
