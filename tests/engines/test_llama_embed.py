"""Embeddings on llama.cpp: the port's sentences about them, and llama-cpp-python's own vectors beside ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rigs import LLAMA, left_behind, loaded

pytest.importorskip("llama_cpp")
gguf = pytest.importorskip("gguf")

import llama_cpp  # noqa: E402 - after the check that it is there
import tiny_bert  # noqa: E402
from small_llama import write as write_llama  # noqa: E402

from citadel.engine import EmbedJob, Engine, EngineSpec, Job, Sampling, Vector  # noqa: E402
from citadel.errors import BadRequest, EdgeError, EngineRestarted, InputTooLong, LlmUnavailable  # noqa: E402
from engines.llama import Llama  # noqa: E402
from engines.llama_embed import _AT_ONCE, EmbedContext  # noqa: E402

pytestmark = pytest.mark.real

TEXTS = ("the cat sat on the mat", "a dog ran far away", "the cat")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.write(tmp_path_factory.mktemp("bert") / "bert.gguf")


def spec(source: Path, **options: Any) -> EngineSpec:
    return EngineSpec("bert", source, None, 2, None, None, source.parent, {"n_threads": 1, **options}, task="embed")


async def vectors(engine: Engine, texts: Sequence[Sequence[int]], id_: str = "job") -> list[Vector]:
    async with aclosing(engine.embed(EmbedJob(id_, texts))) as found:
        return [vector async for vector in found]


def bare(source: Path, text: str, pooling: int = llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED) -> list[float]:
    model = llama_cpp.Llama(
        str(source), embedding=True, n_ctx=64, n_threads=1, pooling_type=pooling, flash_attn=False, verbose=False
    )
    try:
        found: Any = model.embed(text, normalize=True)
        return found
    finally:
        model.close()


async def test_vectors_are_those_of_a_bare_call(bert: Path) -> None:
    tokenizer = await asyncio.to_thread(Llama.open_tokenizer, spec(bert))
    texts = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    assert tokenizer.decode(texts[2]) == "[CLS] the cat[SEP]"
    async with loaded(LLAMA, spec(bert)) as engine:
        found = await vectors(engine, texts)
    for text, vector in zip(TEXTS, found, strict=True):
        assert len(vector) == tiny_bert.WIDTH
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        assert np.dot(vector, await asyncio.to_thread(bare, bert, text)) > 0.999
    assert np.dot(found[0], found[1]) < 0.99, "two texts, two vectors"


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_a_model_that_generates_can_embed_with_a_pooling_that_its_owner_chose(
    tmp_path: Path, pooling: str
) -> None:
    source = write_llama(tmp_path / "llama.gguf")
    tokenizer = await asyncio.to_thread(Llama.open_tokenizer, spec(source))
    async with loaded(LLAMA, spec(source, pooling=pooling)) as engine:
        texts = [tokenizer.encode(text, add_special=True) for text in ("hello there", "hello", "other words")]
        together = await vectors(engine, texts)
        alone = [(await vectors(engine, [text]))[0] for text in texts]
    number = {"mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN, "last": llama_cpp.LLAMA_POOLING_TYPE_LAST}[pooling]
    for one, other in zip(together, alone, strict=True):
        assert np.dot(one, other) > 0.999, "texts of one computation do not see each other"
    assert np.dot(together[0], await asyncio.to_thread(bare, source, "hello there", number)) > 0.999


async def test_a_long_text_has_what_stands_around_a_text_once(bert: Path) -> None:
    tokenizer = await asyncio.to_thread(Llama.open_tokenizer, spec(bert))
    long = tokenizer.encode("the cat " * 5000, add_special=True)
    assert long == [*tokenizer.encode("", add_special=True)[:1], *tokenizer.encode("the cat") * 5000, 3]


async def test_without_a_pooling_it_cannot_be_started(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "llama.gguf")
    before = left_behind()
    with pytest.raises(LlmUnavailable, match="set pooling"):
        await Llama.load(spec(source), lambda _fraction: None)
    assert left_behind() == before


async def test_a_model_without_a_cache_does_not_generate(bert: Path) -> None:
    generating = EngineSpec("bert", bert, None, 2, None, None, bert.parent, {"n_threads": 1})
    before = left_behind()
    with pytest.raises(LlmUnavailable, match="makes embeddings and no text"):
        await Llama.load(generating, lambda _fraction: None)
    assert left_behind() == before


async def test_each_refuses_what_the_other_does(bert: Path, tmp_path: Path) -> None:
    async with loaded(LLAMA, spec(bert)) as engine:
        with pytest.raises(BadRequest, match="no text"):
            await anext(engine.generate(Job("job", [5], Sampling(max_tokens=1))))
    source = write_llama(tmp_path / "llama.gguf")
    async with loaded(LLAMA, EngineSpec("llama", source, None, 2, None, None, tmp_path, {"n_threads": 1})) as engine:
        with pytest.raises(BadRequest, match="no embeddings"):
            await vectors(engine, [[5]])


async def test_many_texts_of_several_jobs_come_each_in_its_own_order(bert: Path) -> None:
    words = range(5, 5 + len(tiny_bert.WORDS))
    wanted = [[2, *([word] * length), 3] for length in (1, 30, 2) for word in words] * 4
    assert len(wanted) > 2 * _AT_ONCE
    async with loaded(LLAMA, spec(bert)) as engine:
        alone = {tuple(text): (await vectors(engine, [text]))[0] for text in wanted}
        jobs = [wanted, wanted[::-1], wanted[:5]]
        found = await asyncio.gather(*(vectors(engine, texts, f"job-{at}") for at, texts in enumerate(jobs)))
    for texts, together in zip(jobs, found, strict=True):
        for text, vector in zip(texts, together, strict=True):
            assert np.dot(vector, alone[tuple(text)]) > 0.999


async def test_a_text_may_fill_the_context_and_no_more(bert: Path) -> None:
    async with loaded(LLAMA, spec(bert, n_ubatch=512)) as engine:
        assert engine.info.context_length == tiny_bert.CONTEXT
        (vector,) = await vectors(engine, [[5] * tiny_bert.CONTEXT])
        assert len(vector) == tiny_bert.WIDTH
        with pytest.raises(InputTooLong, match="maximum context length is 64 tokens"):
            await vectors(engine, [[5], [5] * (tiny_bert.CONTEXT + 1)])
        for texts in ([], [[]], [[5], [-1]], [[len(tiny_bert.TOKENS)]]):
            with pytest.raises(BadRequest):
                await vectors(engine, texts)
        assert engine.dead is None


async def test_a_job_that_is_closed_leaves_nothing_behind(bert: Path) -> None:
    before = left_behind()
    async with loaded(LLAMA, spec(bert)) as engine:
        running = engine.embed(EmbedJob("long", [[5] * 60] * 500))
        await anext(running)
        await running.aclose()
        assert len(await vectors(engine, [[5], [6]])) == 2
        running = engine.embed(EmbedJob("long", [[5] * 60] * 500))
        await anext(running)
        await engine.close()
        with pytest.raises(EngineRestarted):
            async for _ in running:
                pass
    assert left_behind() == before


async def test_a_vector_without_a_direction_is_an_error_of_its_job_alone(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EmbedContext.vectors

    def with_nothing(context: EmbedContext, texts: Sequence[Sequence[int]]) -> Any:
        found = made(context, texts)
        return [
            values * np.float32("nan") if text == [9] else values for text, values in zip(texts, found, strict=True)
        ]

    monkeypatch.setattr(EmbedContext, "vectors", with_nothing)
    async with loaded(LLAMA, spec(bert)) as engine:
        failing, fine = await asyncio.gather(
            vectors(engine, [[5], [9], [5]], "failing"), vectors(engine, [[5]] * 3, "fine"), return_exceptions=True
        )
    assert isinstance(failing, EdgeError)
    assert isinstance(fine, list)
    assert len(fine) == 3
