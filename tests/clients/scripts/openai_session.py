"""What a user of the OpenAI SDK does, against a running server; run by test_openai.py with each SDK version.

Usage: python openai_session.py BASE_URL KEY MODEL. Each check asserts; the last line printed is the SDK's version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France? Tell me about it."}]


def list_models(client: OpenAI, model: str) -> None:
    entries = {entry.id: entry for entry in client.models.list()}
    assert model in entries
    assert entries[model].owned_by == "hl1"
    assert client.models.retrieve(model).id == model


def chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=16, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.model == model


def stream_equals_chat(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    client.chat.completions.create(**asked)  # so that both below find the same prefix computed
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def stop(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    client.chat.completions.create(**asked)
    whole = client.chat.completions.create(**asked).choices[0].message.content
    assert whole
    word = whole.split()[3]
    cut = client.chat.completions.create(**asked, stop=[word]).choices[0]
    assert cut.message.content == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


def seed(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 24, "temperature": 1}
    client.chat.completions.create(**asked, seed=1)
    texts = [client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 8
    assert "".join(token.token for token in found.content) == answer.choices[0].message.content
    for token in found.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy: the chosen one is the likeliest
        assert bytes(token.bytes or []).decode() == token.token


def two_choices(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 1, "seed": 5}
    answer = client.chat.completions.create(**asked, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def cancel_in_mid_stream(client: OpenAI, model: str) -> None:
    for _ in range(20):  # more often than there are slots to lose
        stream = client.chat.completions.create(model=model, messages=HELLO, max_tokens=1000, stream=True)
        next(iter(stream))
        stream.close()
    chat(client, model)


def errors(client: OpenAI, model: str) -> None:
    ask = client.chat.completions.create
    _raises(openai.NotFoundError, "model_not_found", lambda: ask(model="no-such-model", messages=HELLO))
    stranger = client.with_options(api_key="hlk_not_a_key")
    _raises(openai.AuthenticationError, "invalid_api_key", stranger.models.list)
    _raises(openai.BadRequestError, "BadRequestError", lambda: ask(model=model, messages=HELLO, temperature=3))
    long: list[Any] = [{"role": "user", "content": "word " * 5000}]
    error = _raises(openai.BadRequestError, "context_length_exceeded", lambda: ask(model=model, messages=long))
    assert "maximum context length is 2048 tokens" in error.message


def _raises(kind: type[openai.APIStatusError], code: str, call: Callable[[], object]) -> openai.APIStatusError:
    caught: openai.APIStatusError | None = None
    try:
        call()
    except kind as error:
        caught = error
    assert caught is not None, f"{kind.__name__} was expected"
    assert caught.code == code, caught.code
    return caught


def conversation(client: OpenAI, model: str) -> None:
    messages = list(HELLO)
    for question in ("And of Spain?", "Thank you."):
        stream = client.chat.completions.create(model=model, messages=messages, max_tokens=16, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert client.chat.completions.create(model=model, messages=messages, max_tokens=16).choices[0].message.content


CHECKS = (
    list_models,
    chat,
    conversation,
    stream_equals_chat,
    stop,
    seed,
    logprobs,
    two_choices,
    cancel_in_mid_stream,
    errors,
)


def main() -> None:
    url, key, model = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key=key, timeout=300)
    for check in CHECKS:
        check(client, model)
        print(check.__name__, "ok", flush=True)
    print(openai.__version__)


if __name__ == "__main__":
    main()
