"""The test model: its files agree, both engines say the same with it, and what they say is right."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from multiprocessing import resource_tracker
from random import Random

import pytest
import pytest_asyncio

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("llama_cpp")
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file

from citadel.engine import Tokenizer
from citadel.messages import Content, Message, Reasoning, TextEvent, ToolCall, ToolCallArguments, ToolCallStarted
from citadel.text.formats import recognise
from citadel.text.machine import Machine
from citadel.text.template import opens_reasoning
from citadel.wire.request import chat_request
from engines import adapter

from .evaluate import DIALOGUES, Speaker, expected, said, speaker, spec
from .export import CHECKPOINT, GGUF, gguf_name
from .generate import TEMPLATE, Dialogue, training, unseen
from .language import TOOLS

ENGINES = ("hyperqwen", "llama")
LEAST_RIGHT = 0.95
LEAST_ALIKE = 0.98
"""Of the dialogues in which both engines write the same. Each rounds its sums in the order that suits the CPU, so where
the model wavers between two tokens, which is where it is wrong, one of them may take the other."""
FORMAT = recognise(TEMPLATE, ())

has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    return unseen(DIALOGUES)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    cache = tmp_path_factory.mktemp("tokenizers")
    return [adapter(engine).open_tokenizer(spec(engine, cache)) for engine in ENGINES]


# The dialogues.


def test_the_same_seed_gives_the_same_dialogues(dialogues: list[Dialogue]) -> None:
    assert unseen(20) == dialogues[:20]
    assert len({one.text() for one in dialogues}) == DIALOGUES


def test_what_is_unseen_is_in_no_training(dialogues: list[Dialogue]) -> None:
    trained = {one.text() for seed in (0, 1) for one in islice(training(seed), 2000)}
    assert trained.isdisjoint(one.text() for one in dialogues)


def test_dialogues_are_of_every_kind(dialogues: list[Dialogue]) -> None:
    answers = [one.messages[at] for one in dialogues for at in one.answers()]
    assert {len(message.tool_calls) for message in answers} >= {0, 1, 2, 3}
    assert {message.reasoning is None for message in answers} == {True, False}
    assert {min(len(one.tools), 2) for one in dialogues} == {0, 1, 2}
    assert {call.name for message in answers for call in message.tool_calls} == TOOLS.keys()
    assert any(message.content == "I have no tool for that." for message in answers)


def test_the_template_is_recognised_and_opens_reasoning_where_it_is_wanted() -> None:
    assert FORMAT.name == "qwen3_xml"
    one = Dialogue((), (Message("user", "Hello, I am Mira."), Message("assistant", "Hello Mira.", "I need no tool.")))
    off = Dialogue((), (one.messages[0], Message("assistant", "Hello Mira.")))
    assert one.prompt(1).endswith("<|im_start|>assistant\n<think>\n")
    assert opens_reasoning(one.prompt(1), "<think>")
    assert off.prompt(1).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_later_prompt_goes_on_where_the_output_ended(dialogues: list[Dialogue]) -> None:
    """So that all of an agent's last turn is found in the prefix cache."""
    for one in dialogues[:50]:
        for answer in one.answers()[:-1]:
            written = one.prompt(answer) + one.output(answer)
            assert one.prompt(one.answers()[-1]).startswith(written)


def test_the_body_asks_what_the_request_does(dialogues: list[Dialogue]) -> None:
    for one in dialogues:
        for answer in one.answers():
            asked, request = chat_request(one.body(answer), "tiny", "tiny"), one.request(answer)
            assert asked.messages == request.messages
            assert asked.tools == request.tools
            assert asked.template_kwargs == request.template_kwargs


def test_the_machine_reads_what_the_model_is_to_write(dialogues: list[Dialogue]) -> None:
    for one in dialogues:
        for answer in one.answers():
            assert read(one, answer, one.output(answer)) == one.messages[answer]


def read(one: Dialogue, answer: int, output: str) -> Message:
    """An output as a message, its ids those of the dialogue."""
    wanted = one.messages[answer]
    ids = iter([call.id for call in wanted.tool_calls])
    thinking = wanted.reasoning is not None
    machine = Machine(FORMAT, one.tools, in_reasoning=thinking, new_id=lambda: next(ids, "one more"))
    events = [*machine.feed(output), *machine.finish(cut=False)]
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return Message("assistant", content or None, reasoning if thinking else None, tuple(_calls(events)))


def _calls(events: Sequence[TextEvent]) -> Iterator[ToolCall]:
    """Arguments in the notation of Python's json."""
    for begun in events:
        if isinstance(begun, ToolCallStarted):
            fragments = (event for event in events if isinstance(event, ToolCallArguments))
            arguments = "".join(event.text for event in fragments if event.index == begun.index)
            yield ToolCall(begun.id, begun.name, json.dumps(json.loads(arguments)))


# The files.


def test_both_files_hold_the_same_weights() -> None:
    checkpoint = load_file(CHECKPOINT / "model.safetensors")
    gguf = {tensor.name: tensor for tensor in GGUFReader(GGUF).tensors}
    assert gguf.keys() == {gguf_name(name) for name in checkpoint}
    for name, weights in checkpoint.items():
        tensor = gguf[gguf_name(name)]
        found = torch.from_numpy(tensor.data.copy())
        if tensor.tensor_type is GGMLQuantizationType.BF16:
            found = found.view(torch.bfloat16)
        assert torch.equal(found.to(torch.bfloat16), weights), name


def test_the_model_is_small_and_its_input_and_output_are_not_tied() -> None:
    checkpoint = load_file(CHECKPOINT / "model.safetensors")
    assert {tensor.dtype for tensor in checkpoint.values()} == {torch.bfloat16}
    assert 0.8e6 < sum(tensor.numel() for tensor in checkpoint.values()) < 1.1e6
    assert checkpoint["lm_head.weight"].shape[0] < 1024
    assert not torch.equal(checkpoint["lm_head.weight"], checkpoint["model.embed_tokens.weight"])
    assert all(file.stat().st_size < 3e6 for file in (GGUF, *CHECKPOINT.iterdir()))


def test_both_tokenizers_cut_texts_alike(tokenizers: list[Tokenizer], dialogues: list[Dialogue]) -> None:
    one, other = tokenizers
    for text in (*(each.text() for each in dialogues), *strange_texts(Random(3), 2000)):
        ids = one.encode(text)
        assert ids == other.encode(text), text
        assert one.decode(ids) == other.decode(ids) == text
    assert (one.chat_template, one.context_length) == (other.chat_template, other.context_length) == (TEMPLATE, 1024)
    assert one.special_tokens["eos_token"] == other.special_tokens["eos_token"] == "<|im_end|>"
    assert one.vocabulary_size == other.vocabulary_size < 1024


def strange_texts(rng: Random, count: int) -> Iterator[str]:
    parts = [*map(chr, range(32, 127)), *"\n\n\t\r\u00a0\u2003\u0301éß日🙂٣", "  ", "12", "'s", "'ll", "</", "<tool"]
    parts += ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>", "Oslo", " Mira"]
    for _ in range(count):
        yield "".join(rng.choices(parts, k=rng.randint(1, 40)))


@pytest.mark.parametrize("digits", ["7", "42", "1234567"])
def test_each_digit_is_a_token_of_its_own(tokenizers: list[Tokenizer], digits: str) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode(f" {digits}\n")
        assert [tokenizer.decode([each]) for each in ids] == [" ", *digits, "\n"]


# The engines.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speakers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mapping[str, Speaker]]:
    resource_tracker.ensure_running()  # a process of Python's that stays once anything has used multiprocessing
    async with AsyncExitStack() as loaded:
        cache = tmp_path_factory.mktemp("engines")
        yield {each: await loaded.enter_async_context(speaker(each, spec(each, cache))) for each in ENGINES}


@pytest.mark.real
@has_vllm
@pytest.mark.asyncio(loop_scope="module")
async def test_both_engines_are_right_and_say_the_same(
    speakers: Mapping[str, Speaker], dialogues: list[Dialogue]
) -> None:
    texts = {engine: await said(each, dialogues) for engine, each in speakers.items()}
    for engine, outputs in texts.items():
        right = sum(found == wanted for found, wanted in zip(outputs, expected(dialogues), strict=True))
        print(f"{engine}: {right} of {len(dialogues)} dialogues exactly right")
        assert right >= LEAST_RIGHT * len(dialogues), engine
    differing = [at for at, (one, other) in enumerate(zip(*texts.values(), strict=True)) if one != other]
    assert len(differing) <= (1 - LEAST_ALIKE) * len(dialogues), differing
