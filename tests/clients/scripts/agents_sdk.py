"""OpenAI's agents SDK: a loop of two tools over chat completions and over responses, streamed and not; a wrong key."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from facts import KEY, MODEL, URL, WRONG_KEY
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)
client = AsyncOpenAI(base_url=URL, api_key=KEY)
called: list[object] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "18 degrees"


@function_tool
def to_fahrenheit(celsius: float) -> str:
    """Degrees in another unit."""
    called.append(celsius)
    return "64.4"


def agent(model: Any) -> Agent[None]:
    return Agent(name="weather", instructions="Be brief.", tools=[get_weather, to_fahrenheit], model=model)


async def loop(model: Any, *, streamed: bool) -> None:
    called.clear()
    question = "What is the weather in Paris?"
    if streamed:
        result: Any = Runner.run_streamed(agent(model), question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent(model), question)
    assert result.final_output == "It is 64.4 degrees Fahrenheit in Paris."
    assert called == ["Paris", 18]


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        for streamed in (False, True):
            await loop(kind(MODEL, client), streamed=streamed)
        stranger = AsyncOpenAI(base_url=URL, api_key=WRONG_KEY)
        try:
            await Runner.run(agent(kind(MODEL, stranger)), "hi")
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a wrong key was taken")


asyncio.run(main())
