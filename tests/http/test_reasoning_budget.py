"""A model that thinks for longer than its owner allows has to answer, on whichever engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import EngineInfo, Job, Piece, Sampling
from citadel.messages import Content, Reasoning, TextEvent
from citadel.reasoning import Budget, bounded
from citadel.text.formats import FORMATS
from citadel.text.reader import Reader, Reading
from engines.replay import ReplayTokenizer
from tests.conftest import Serving, events_of, make_config, serving, write_script
from tests.models.export import GGUF

LONG = ["Let", " me", " see", " more", " and", " more", "\n</think>", "\n\n", "Never."]
SCRIPT = [
    {"when": "itself", "behind": "\n</think>\n\n", "pieces": ["It is ", "four."]},
    {"when": "itself", "pieces": ["<think>", "\n", *LONG]},
    {"when": "opened", "behind": "\n</think>\n\n", "pieces": ["Fo", "ur."], "finish": "length"},
    {"when": "opened", "pieces": LONG, "reasoning_open": True},
    {"when": "short", "pieces": ["<think>", "Well.", "</think>", "Four."]},
    {"pieces": ["Hello", ", ", "world", "."]},
]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [4]}}, "required": ["n"], "additionalProperties": False}


def config(folder: Path, **model: Any):
    source = write_script(folder / "script.jsonl", SCRIPT)
    return make_config(folder, {"m": {"engine": "replay", "source": source, "slots": 2, **model}})


async def answer(server: Serving, text: str, **fields: Any) -> dict[str, Any]:
    async with server.chat(text, **fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "tokens", "thought", "finish"),
    [
        ("itself", "Let me", "It is four.", 6, 4, "stop"),
        ("opened", "Let me see more", "Four.", 6, 4, "length"),
        ("short", "Well.", "Four.", 4, 2, "stop"),
        ("hello", None, "Hello, world.", 4, 0, "stop"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_reasoning_ends_at_its_budget_and_the_answer_follows(
    tmp_path: Path, text: str, reasoning: str | None, content: str, tokens: int, thought: int, finish: str, n: int
) -> None:
    async with serving(config(tmp_path, reasoning_budget=4)) as server:
        got = await answer(server, text, n=n)
        async with server.chat(text, n=n, stream=True) as response:
            chunks, _ = await events_of(response)
    assert len(got["choices"]) == n
    for choice in got["choices"]:
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)
        assert choice["finish_reason"] == finish
        deltas = [part["delta"] for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == (reasoning or "")
        assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert got["usage"]["completion_tokens"] == n * tokens
    assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] == n * thought


async def test_without_a_budget_a_model_thinks_as_long_as_it_likes(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as server:
        message = (await answer(server, "opened"))["choices"][0]["message"]
    assert message["reasoning"] == "Let me see more and more"
    assert message["content"] == "Never."


@pytest.mark.parametrize(("limit", "content"), [(4, ""), (5, "Fo")])
async def test_the_limit_of_the_output_holds_for_both_parts_together(tmp_path: Path, limit: int, content: str) -> None:
    async with serving(config(tmp_path, reasoning_budget=4)) as server:
        got = await answer(server, "opened", max_tokens=limit)
    assert got["choices"][0]["finish_reason"] == "length"
    assert (got["choices"][0]["message"]["content"] or "") == content
    assert got["usage"]["completion_tokens"] == limit


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.thinking])
async def test_every_familys_reasoning_is_closed_as_the_family_does(name: str) -> None:
    """The engine stub thinks until its job is ended, then answers; harmony's messages have headers."""
    fmt, tokenizer = FORMATS[name], ReplayTokenizer("", {})
    header = "<|channel|>final<|message|>" if fmt.channels else ""
    jobs: list[Job] = []

    class Thinks:
        info = EngineInfo(1000, 1, "stub")
        dead = None

        async def generate(self, job: Job) -> AsyncGenerator[Piece, None]:
            jobs.append(job)
            texts = ["one ", "two ", "three "] if len(jobs) == 1 else [header, "four"]
            for index, text in enumerate(texts):
                yield Piece(text, (index,), 7 * len(jobs), finish="stop" if text == texts[-1] else None)

        async def close(self) -> None:
            raise AssertionError

    async def no_grammar() -> str | None:
        return None

    reader = Reader(Reading(fmt, (), True, (), False, frozenset(), str))
    prompt = tokenizer.encode(f"question{fmt.thinking[-1].open}")
    job = Job("j", prompt, Sampling(max_tokens=10, min_tokens=5))
    events: list[TextEvent] = []
    async with aclosing(bounded(Thinks(), job, reader, Budget(2, fmt, tokenizer, no_grammar))) as pieces:
        async for piece in pieces:
            events += reader.feed(piece)
            assert piece.cached_tokens == 7, "of the caller's prompt"
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "one two "
    assert "".join(event.text for event in events if isinstance(event, Content)) == "four"
    assert jobs[1].prompt[: len(prompt) + 2] == [*prompt, 0, 1]
    assert tokenizer.decode(jobs[1].prompt[len(prompt) + 2 :]).startswith(("\n" + fmt.thinking[-1].close, "<|end|>"))
    assert (jobs[1].sampling.max_tokens, jobs[1].sampling.min_tokens) == (8, 3)
    assert reader.completion_tokens == 4


@pytest.mark.real
@pytest.mark.parametrize("held", [False, True])
async def test_on_a_real_engine_the_answer_keeps_to_its_schema_and_counts_the_callers_prompt(
    tmp_path: Path, held: bool
) -> None:
    pytest.importorskip("llama_cpp")
    model = {"engine": "llama", "source": str(GGUF), "llama": {"n_threads": 1}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"response_format": schema} if held else {}
    asked = "Hello, I am Mira."
    async with serving(make_config(tmp_path, {"m": {**model, "reasoning_budget": 2}})) as server:
        got = await answer(server, asked, temperature=0, max_tokens=200, **fields)
    (choice,), usage = got["choices"], got["usage"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"]
    if held:
        assert json.loads(choice["message"]["content"]) == {"n": 4}
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
