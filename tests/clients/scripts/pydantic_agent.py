"""Pydantic AI: an agent with two tools, streamed and not, structured output, and its own exceptions."""

from __future__ import annotations

import asyncio
from functools import partial

from facts import KEY, MODEL, URL, WRONG_KEY, raises
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def model(name: str = MODEL, key: str = KEY) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=key))


called: list[object] = []
agent = Agent(model(), instructions="Be brief.")


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "18 degrees"


@agent.tool_plain
def to_fahrenheit(celsius: float) -> str:
    """Degrees in another unit."""
    called.append(celsius)
    return "64.4"


async def main() -> None:
    result = await agent.run("What is the weather in Paris?")
    assert result.output == "It is 64.4 degrees Fahrenheit in Paris."
    assert called == ["Paris", 18]
    assert result.usage.requests == 3
    async with agent.run_stream("hi") as streamed:
        assert [text async for text in streamed.stream_text(debounce_by=None)][-1] == "Hello, world."
    native = Agent(model(), output_type=NativeOutput(Person))
    assert (await native.run("Who is Ada?")).output == Person(name="Ada", age=36)


def refused() -> None:
    for name, key, status in ((MODEL, WRONG_KEY, 401), ("nobody", KEY, 404)):
        stranger = Agent(model(name, key))
        assert raises(ModelHTTPError, partial(stranger.run_sync, "hi")).status_code == status


asyncio.run(main())
refused()
