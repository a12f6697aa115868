"""The other routes on both real engines: each says what chat completions says, in its own words; and embeddings."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import events_of
from tests.integrity import drill
from tests.models.export import CHECKPOINT, GGUF
from tests.models.generate import Dialogue, unseen
from tests.real.conftest import ENGINES, RealServer, engines_of
from tests.real.test_agents import ask, calls_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TEXTS = ("add two and three", "what is the weather", "remember this")


async def post(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post(path, json=body) as response:
        told = await response.json()
        assert response.status == 200, told
        return told


def first_answers(count: int, *, calls: bool) -> list[tuple[Dialogue, int]]:
    """Unseen conversations up to where the model first answers, half of them with thinking."""
    found = [(one, one.answers()[0]) for one in unseen(200) if bool(one.messages[one.answers()[0]].tool_calls) is calls]
    thinking = [(one, at) for one, at in found if one.messages[at].reasoning is not None]
    plain = [(one, at) for one, at in found if one.messages[at].reasoning is None]
    return [*thinking[: count // 2], *plain[: count - count // 2]]


def tools(one: Dialogue, shape: str) -> list[dict[str, Any]]:
    named = [{"name": tool.name, "description": tool.description} for tool in one.tools]
    if shape == "messages":
        return [{**each, "input_schema": tool.parameters} for each, tool in zip(named, one.tools, strict=True)]
    return [
        {"type": "function", **each, "parameters": tool.parameters, "strict": False}
        for each, tool in zip(named, one.tools, strict=True)
    ]


# Completions and tokens


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_chat_is_the_completion_of_its_tokens(client: aiohttp.ClientSession, engine: str) -> None:
    (one, at), *_ = first_answers(2, calls=False)[::-1]  # one that does not think
    chat = {**one.body(at), "model": engine, "logprobs": True, "top_logprobs": 2}
    tokens = (await post(client, "/tokenize", chat))["tokens"]
    written = {"model": engine, "prompt": tokens, "temperature": 0, "max_tokens": 200, "logprobs": 2}
    await post(client, "/v1/completions", written)  # so that both below find the same prefix computed
    said, completed = await post(client, "/v1/chat/completions", chat), await post(client, "/v1/completions", written)
    choice, answer = completed["choices"][0], said["choices"][0]
    assert choice["text"] == answer["message"]["content"]
    assert (choice["finish_reason"], answer["finish_reason"]) == ("stop", "stop")
    assert completed["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"] == len(tokens)
    theirs = answer["logprobs"]["content"]
    assert choice["logprobs"]["tokens"][: len(theirs)] == [each["token"] for each in theirs]
    shown = zip(choice["logprobs"]["token_logprobs"], theirs, strict=False)
    assert all(mine == pytest.approx(each["logprob"], abs=1e-3) for mine, each in shown)


@pytest.mark.parametrize("engine", ENGINES)
async def test_logprobs_of_a_completion_are_lists_side_by_side(client: aiohttp.ClientSession, engine: str) -> None:
    asked: dict[str, Any] = {"model": engine, "prompt": "The weather", "max_tokens": 12, "ignore_eos": True}
    asked |= {"logprobs": 3, "temperature": 0, "seed": 1}
    await post(client, "/v1/completions", asked)
    whole = (await post(client, "/v1/completions", asked))["choices"][0]
    async with client.post("/v1/completions", json={**asked, "stream": True}) as response:
        chunks = [choice for event in (await events_of(response))[0] for choice in event["choices"]]
    streamed: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
    for part in (chunk["logprobs"] for chunk in chunks if chunk["logprobs"]):
        for name, values in part.items():
            streamed[name] += values
    found = whole["logprobs"]
    assert streamed["tokens"] == found["tokens"]
    assert streamed["text_offset"] == found["text_offset"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == "".join(found["tokens"])
    assert len(found["tokens"]) == 12
    assert whole["finish_reason"] == "length"
    for token, logprob, top, offset in zip(*(found[name] for name in found), strict=True):
        assert whole["text"][offset:].startswith(token)
        assert top[token] == pytest.approx(logprob)
        assert max(top.values()) == pytest.approx(logprob), "greedy takes the likeliest"
        assert 3 <= len(top) <= 4
        assert sum(map(math.exp, top.values())) <= 1.001


@pytest.mark.parametrize("engine", ENGINES)
async def test_tokens_there_and_back(client: aiohttp.ClientSession, engine: str) -> None:
    text = "Grüße, 世界! <|im_end|>"
    told = await post(client, "/tokenize", {"model": engine, "prompt": text, "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["token_strs"][-1] == "<|im_end|>"
    assert (await post(client, "/detokenize", {"model": engine, "tokens": told["tokens"]}))["prompt"] == text


# Responses and messages


@pytest.mark.parametrize("engine", ENGINES)
async def test_responses_and_messages_call_what_chat_calls(client: aiohttp.ClientSession, engine: str) -> None:
    called = 0
    for one, at in first_answers(4, calls=True):
        chat = {**one.body(at), "model": engine}
        await ask(client, chat)  # so that all below find the same prefix computed
        expected = calls_of(await ask(client, chat))
        response = await post(client, "/v1/responses", responses_body(one, at, engine))
        message = await post(client, "/v1/messages", messages_body(one, at, engine))
        functions = [item for item in response["output"] if item["type"] == "function_call"]
        assert [(item["name"], json.loads(item["arguments"])) for item in functions] == expected
        uses = [block for block in message["content"] if block["type"] == "tool_use"]
        assert [(block["name"], block["input"]) for block in uses] == expected
        assert message["stop_reason"] == ("tool_use" if expected else "end_turn")
        called += len(expected)
    assert called > 0


@pytest.mark.parametrize("engine", ENGINES)
async def test_responses_and_messages_think_and_say_what_chat_does(client: aiohttp.ClientSession, engine: str) -> None:
    thought = 0
    for one, at in first_answers(4, calls=False):
        chat = {**one.body(at), "model": engine}
        await ask(client, chat)
        expected = (await ask(client, chat))["message"]
        response = await post(client, "/v1/responses", responses_body(one, at, engine))
        message = await post(client, "/v1/messages", messages_body(one, at, engine))
        streamed = await last_response(client, responses_body(one, at, engine))
        said = [item for item in response["output"] if item["type"] == "message"]
        assert "".join(item["content"][0]["text"] for item in said) == (expected["content"] or "")
        assert [item.get("content") for item in streamed["output"]] == [
            item.get("content") for item in response["output"]
        ]
        blocks = {block["type"]: block for block in message["content"]}
        assert blocks["text"]["text"] == expected["content"]
        assert blocks.get("thinking", {}).get("thinking") == expected["reasoning"]
        reasoning = [item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning"]
        assert reasoning == ([] if expected["reasoning"] is None else [expected["reasoning"]])
        thought += len(reasoning)
    assert thought > 0


def conversation(one: Dialogue, at: int) -> list[dict[str, Any]]:
    return [{"role": each.role, "content": each.content} for each in one.messages[:at] if each.role != "system"]


def system_of(one: Dialogue, at: int) -> str | None:
    return next((each.content for each in one.messages[:at] if each.role == "system"), None)


def thinks(one: Dialogue, at: int) -> bool:
    return one.messages[at].reasoning is not None


def responses_body(one: Dialogue, at: int, engine: str) -> dict[str, Any]:
    effort = "medium" if thinks(one, at) else "none"
    body = {"model": engine, "input": conversation(one, at), "temperature": 0, "reasoning": {"effort": effort}}
    return body | {"instructions": system_of(one, at), "tools": tools(one, "responses")}


def messages_body(one: Dialogue, at: int, engine: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": engine, "messages": conversation(one, at), "temperature": 0, "max_tokens": 1000}
    if thinks(one, at):
        body["thinking"] = {"type": "enabled", "budget_tokens": 500}
    if (system := system_of(one, at)) is not None:
        body["system"] = system
    return body | {"tools": tools(one, "messages")}


async def last_response(client: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post("/v1/responses", json={**body, "stream": True}) as response:
        *_, last = re.findall(r"^data: (.*)$", await response.text(), re.MULTILINE)
    told = json.loads(last)
    assert told["type"] == "response.completed"
    return told["response"]


# Embeddings, and what is counted of all


def by_hand() -> dict[str, list[list[float]]]:
    """The vectors of `TEXTS` by each engine's model, computed without it: the last token's on vLLM, llama's mean."""
    import llama_cpp  # noqa: PLC0415 - heavy, and for this only
    import torch  # noqa: PLC0415
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

    tokenizer, model = AutoTokenizer.from_pretrained(CHECKPOINT), AutoModel.from_pretrained(CHECKPOINT)
    last: list[list[float]] = []
    with torch.no_grad():
        for text in TEXTS:
            vector = model.float()(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
            last.append((vector / vector.norm()).tolist())
    bare = llama_cpp.Llama(
        str(GGUF), embedding=True, n_ctx=256, n_threads=1, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN, verbose=False
    )
    mean: Any = [bare.embed(text, normalize=True) for text in TEXTS]
    bare.close()
    return {"hyperqwen": last, "llama": mean}


@pytest.fixture(scope="module")
def vectors() -> dict[str, list[list[float]]]:
    return by_hand()


@pytest.mark.parametrize("engine", ENGINES)
async def test_embeddings_are_those_computed_by_hand(
    client: aiohttp.ClientSession, engine: str, vectors: dict[str, list[list[float]]]
) -> None:
    model = f"{engine}-embed"
    told = await post(client, "/v1/embeddings", {"model": model, "input": list(TEXTS)})
    found = [each["embedding"] for each in told["data"]]
    for mine, theirs in zip(found, vectors[engine], strict=True):
        assert np.linalg.norm(mine) == pytest.approx(1, abs=1e-5)
        assert np.dot(mine, theirs) > 0.99
    assert np.dot(found[0], found[1]) < 0.9, "two texts, two vectors"
    many = [TEXTS[0]] * 60
    async with asyncio.timeout(60):
        several = await asyncio.gather(
            *(
                post(client, "/v1/embeddings", {"model": model, "input": many})
                for _ in range(1 if engine == "llama" else 3)
            )
        )
    for each in several:
        assert len(each["data"]) == 60
        assert min(np.dot(one["embedding"], found[0]) for one in each["data"]) > 0.99


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_model_does_what_its_task_is(client: aiohttp.ClientSession, engine: str) -> None:
    wrong = {
        "/v1/embeddings": {"model": engine, "input": "hi"},
        "/v1/chat/completions": {"model": f"{engine}-embed", "messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in wrong.items():
        async with client.post(path, json=body) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "model")


async def test_embedding_jobs_end_with_their_caller_and_with_their_engine(
    client: aiohttp.ClientSession, tiny_server: RealServer
) -> None:
    """Both engines of vLLM are loaded by now, in one process: the series of each survive the end of the other."""
    await ask(client, {"model": "hyperqwen", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    small = {"model": "hyperqwen-embed", "input": "hi"}
    await post(client, "/v1/embeddings", small)
    before = await series(client)
    long = {**small, "input": [" ".join(TEXTS * 6)] * 2048}
    text = {"model": "hyperqwen-embed", "prompt": long["input"][0]}
    whole = 2048 * (await post(client, "/tokenize", text))["count"]
    async with client.post("/admin/models/hyperqwen/unload") as response:
        assert response.status == 202
    async with asyncio.timeout(60):
        while len(engines := engines_of(tiny_server)) > 1:
            await state_of(client, "hyperqwen")
    async with drill(client, tiny_server.url, tiny_server.pid) as delivered:
        leaver = asyncio.create_task(post(client, "/v1/embeddings", long))
        await until_running(client, 1)
        leaver.cancel()
        await until_running(client, 0)
        delivered.cut(None, whole - 1, counts=False)
        delivered.whole((await post(client, "/v1/embeddings", small))["usage"])
        victim = asyncio.create_task(refused(client, long))
        await until_running(client, 1)
        engines[0].kill()
        assert await victim == (502, "engine_restarted")
        delivered.cut(None, whole - 1, counts=False)
        delivered.whole((await post(client, "/v1/embeddings", small))["usage"])  # which starts it again
    after = await series(client)
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith(("_total", "_count")))
    for model, loads in (("hyperqwen", 1), ("hyperqwen-embed", 2)):
        assert after["citadel_load_seconds_count", model] >= loads
        assert after["citadel_tokens_total", model, "prompt"] > 0


async def until_running(client: aiohttp.ClientSession, count: int) -> None:
    """Waits until the vLLM model for embeddings has so many calls."""
    running = None
    async with asyncio.timeout(60):
        while running != count:
            running = (await state_of(client, "hyperqwen-embed"))["running"]


async def state_of(client: aiohttp.ClientSession, model: str) -> dict[str, Any]:
    async with client.get("/admin/models") as response:
        return next(each for each in (await response.json())["models"] if each["id"] == model)


async def refused(client: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, str]:
    """The status and type of the error that a call for embeddings ends with."""
    async with client.post("/v1/embeddings", json=body) as response:
        return response.status, (await response.json())["error"]["type"]


async def series(client: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """Values by the name of the series and its labels' values, the model's first."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples]
    return {
        (
            each.name,
            *(each.labels[name] for name in sorted(each.labels, key=lambda name: (name != "model", name))),
        ): each.value
        for each in samples
    }
