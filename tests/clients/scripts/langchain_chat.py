"""LangChain's ChatOpenAI and OpenAIEmbeddings: invoke, stream, tools, structured output, errors."""

from __future__ import annotations

import openai
from facts import ASLEEP, KEY, MODEL, NO_WAIT, URL, WRONG_KEY, raises
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, stream_usage=True)


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "18 degrees"


@tool
def to_fahrenheit(celsius: float) -> str:
    """Degrees in another unit."""
    assert celsius == 18
    return "64.4"


assert model.invoke("hi").content == "Hello, world."
chunks = list(model.stream("hi"))
assert "".join(str(chunk.content) for chunk in chunks) == "Hello, world."
whole = sum(chunks[1:], chunks[0])
assert whole.usage_metadata is not None
assert whole.usage_metadata["output_tokens"] == 4

tools = {each.name: each for each in (get_weather, to_fahrenheit)}
able = model.bind_tools(list(tools.values()))
messages = [HumanMessage("What is the weather in Paris?")]
called = []
while (turn := able.invoke(messages)).tool_calls:
    messages.append(turn)
    for call in turn.tool_calls:
        called.append(call["name"])
        messages.append(ToolMessage(tools[call["name"]].invoke(call["args"]), tool_call_id=call["id"]))
assert called == ["get_weather", "to_fahrenheit"]
assert turn.content == "It is 64.4 degrees Fahrenheit in Paris."

for method in ("json_schema", "json_mode"):
    assert model.with_structured_output(Person, method=method).invoke("Who is Ada?") == Person(name="Ada", age=36)

vectors = OpenAIEmbeddings(model="embedder", base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
assert len(vectors.embed_documents(["one", "two"])) == 2

raises(openai.AuthenticationError, lambda: ChatOpenAI(model=MODEL, base_url=URL, api_key=WRONG_KEY).invoke("hi"))
raises(openai.NotFoundError, lambda: ChatOpenAI(model="nobody", base_url=URL, api_key=KEY).invoke("hi"))
again = ChatOpenAI(model=ASLEEP, base_url=URL, api_key=KEY, max_retries=5, default_headers=NO_WAIT)
assert again.invoke("hi").content == "Hello, world."
