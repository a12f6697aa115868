"""`/v1/embeddings` over a small model on llama.cpp: OpenAI's shapes, its SDK, the same limits as any call."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from citadel.config import Config
from tests.conftest import Serving, make_config, serving
from tests.process import ROOT

pytestmark = pytest.mark.real


def config(folder: Path, **limits: Any) -> Config:
    chat = {
        "engine": "llama",
        "source": str(ROOT / "tests" / "models" / "tiny.gguf"),
        "llama": {"n_threads": 1},
        "slots": 2,
        "context_length": 64,
    }
    embed = {**chat, "task": "embed", "aliases": ["text-embedding-3-small"], "max_parallel": 8}
    embed["llama"] = {"n_threads": 1, "pooling": "mean"}
    return make_config(folder, {"chat": chat, "embed": embed}, limits=limits)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    async with serving(config(tmp_path)) as running:
        yield running
        running.services.registry.check_integrity()


async def ask(server: Serving, status: int, **body: Any) -> dict[str, Any]:
    async with server.session.post(f"{server.url}/v1/embeddings", json={"model": "embed", **body}) as response:
        told = await response.json()
        assert response.status == status, told
        return told


async def tokens(server: Serving, text: str) -> list[int]:
    async with server.session.post(f"{server.url}/tokenize", json={"model": "embed", "prompt": text}) as response:
        return (await response.json())["tokens"]


async def test_every_kind_of_input_gives_the_same_vectors(server: Serving) -> None:
    one, two = await tokens(server, "add 2 and 3"), await tokens(server, "what is left")
    texts = await ask(server, 200, input=["add 2 and 3", "what is left"])
    assert texts["object"] == "list"
    assert texts["model"] == "embed"
    assert [(each["object"], each["index"]) for each in texts["data"]] == [("embedding", 0), ("embedding", 1)]
    assert texts["usage"] == {"prompt_tokens": len(one) + len(two), "total_tokens": len(one) + len(two)}
    first, second = (each["embedding"] for each in texts["data"])
    assert sum(value * value for value in first) == pytest.approx(1)
    assert first != pytest.approx(second, abs=0.01)
    same = [
        (await ask(server, 200, input="add 2 and 3"))["data"][0],
        (await ask(server, 200, input=one))["data"][0],
        (await ask(server, 200, input=[two, one]))["data"][1],
    ]
    for each in same:
        assert each["embedding"] == pytest.approx(first, abs=0.01)


async def test_base64_holds_the_same_numbers(server: Serving) -> None:
    plain = (await ask(server, 200, input="hello", encoding_format="float"))["data"][0]["embedding"]
    packed = base64.b64decode((await ask(server, 200, input="hello", encoding_format="base64"))["data"][0]["embedding"])
    assert struct.unpack(f"<{len(plain)}f", packed) == pytest.approx(plain, abs=1e-6)


async def test_openais_sdk_reads_them(server: Serving) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        answer = await client.embeddings.create(model="text-embedding-3-small", input=["hello", "there"], user="u")
        assert answer.model == "text-embedding-3-small"
        assert [len(each.embedding) for each in answer.data] == [len(answer.data[0].embedding)] * 2
        with pytest.raises(openai.BadRequestError, match="dimensions") as caught:
            await client.embeddings.create(model="embed", input="hello", dimensions=8)
        assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input[0]", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": [-1]}, "input[0]", "greater"),
        ({"input": [1 << 30]}, "input[0]", "token ids of this model are below"),
        ({"input": [1, "a"]}, "input", "valid"),
        ({"input": {"text": "a"}}, "input", "valid"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "dimensions": 3}, "dimensions", "not supported"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    server: Serving, body: dict[str, Any], param: str, says: str
) -> None:
    error = (await ask(server, 400, **body))["error"]
    assert (error["code"], error["type"]) == ("BadRequestError", "BadRequestError")
    assert error["param"].startswith(param)
    assert says in error["message"]
    assert server.services.registry.status("embed").state == "stopped", "told without loading the model"


async def test_a_text_that_is_too_long_is_named(server: Serving) -> None:
    error = (await ask(server, 400, input=["short", "word " * 100]))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "maximum context length is 64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ],
)
async def test_a_model_for_embeddings_makes_no_text(server: Serving, path: str, body: dict[str, Any]) -> None:
    async with server.session.post(f"{server.url}{path}", json={"model": "embed", **body}) as response:
        told = await response.json()
        assert (response.status, told["error"]["param"]) == (400, "model")
        assert "/v1/embeddings" in told["error"]["message"]


async def test_a_model_for_text_makes_no_embeddings(server: Serving) -> None:
    error = (await ask(server, 400, model="chat", input="hi"))["error"]
    assert error["param"] == "model"
    assert "/v1/chat/completions" in error["message"]


async def test_they_count_against_the_limits_and_in_the_metrics(tmp_path: Path) -> None:
    async with serving(config(tmp_path, calls_per_minute=2)) as server:
        used = (await ask(server, 200, input=["one", "two"]))["usage"]["prompt_tokens"]
        used += (await ask(server, 200, input="three"))["usage"]["prompt_tokens"]
        assert (await ask(server, 429, input="four"))["error"]["code"] == "rate_limited"
        async with server.session.get(f"{server.url}/metrics") as response:
            text = await response.text()
        assert f'citadel_tokens_total{{kind="prompt",model="embed"}} {used}.0' in text
        assert 'citadel_calls_total{model="embed",outcome="ok"} 2.0' in text
