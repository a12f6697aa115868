"""The contract of `citadel.engine`, a test per sentence, over every engine in `rigs.RIGS`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from rigs import (
    ANSWERS,
    CONTEXT_LENGTH,
    SLOTS,
    Jobs,
    Rig,
    WatchedLoad,
    all_of,
    left_behind,
    loaded,
    stream,
    text_of,
    tokens_of,
)

from citadel.engine import Engine, EngineSpec, Piece, Sampling, SwapAdapter, SwapEngine, Tokenizer
from citadel.errors import BadRequest, CitadelError, ContextLengthExceeded, EngineRestarted, LlmUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


# An adapter.


async def test_need_is_known_from_the_files_alone_in_a_thread(rig: Rig, spec: EngineSpec):
    need = await asyncio.to_thread(rig.adapter.need, spec)
    assert min(need.ram, need.gpu) >= 0
    assert need.ram + need.gpu > 0


async def test_the_owners_figure_replaces_the_estimate(rig: Rig, spec: EngineSpec):
    need = await asyncio.to_thread(rig.adapter.need, replace(spec, memory_bytes=12_345_678_901))
    assert need.ram + need.gpu == 12_345_678_901


async def test_the_tokenizer_is_read_in_a_thread_and_without_an_engine(rig: Rig, spec: EngineSpec):
    before = left_behind()
    tokenizer = await asyncio.to_thread(rig.adapter.open_tokenizer, spec)
    assert tokenizer.encode("hello")
    assert left_behind() == before


async def test_a_loaded_engine_is_ready_to_generate(engine: Engine, jobs: Jobs):
    assert tokens_of(await all_of(engine, jobs.make("What is the capital of France?")))
    assert engine.info.slots == SLOTS
    assert engine.info.context_length == CONTEXT_LENGTH


async def test_the_event_loop_runs_on_during_a_load(load: WatchedLoad):
    assert any(0 < seen < 1 for seen in load.turns), "others had a turn while the load was under way"


async def test_progress_goes_from_0_to_1_and_never_falls(load: WatchedLoad):
    assert (load.progress[0], load.progress[-1]) == (0.0, 1.0)
    assert load.progress == sorted(load.progress)


@pytest.mark.parametrize("content", [None, b"", b"no model\n"], ids=["missing", "empty", "garbage"])
async def test_a_failed_load_is_unavailable_and_leaves_nothing(
    rig: Rig, spec: EngineSpec, tmp_path: Path, content: bytes | None
):
    source = tmp_path / "model"
    if content is not None:
        source.write_bytes(content)
    before = left_behind()
    with pytest.raises(LlmUnavailable):
        await rig.adapter.load(replace(spec, source=source), lambda _fraction: None)
    assert left_behind() == before


async def test_an_option_that_is_unknown_makes_the_load_unavailable(rig: Rig, spec: EngineSpec):
    before = left_behind()
    with pytest.raises(LlmUnavailable, match="no_such_option"):
        await rig.adapter.load(replace(spec, options={"no_such_option": 1}), lambda _fraction: None)
    assert left_behind() == before


async def test_a_cancelled_load_leaves_nothing_and_the_next_one_works(rig: Rig, spec: EngineSpec, jobs: Jobs):
    before = left_behind()
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()
    load = asyncio.create_task(rig.adapter.load(spec, lambda _fraction: loop.call_soon_threadsafe(begun.set)))
    await begun.wait()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert left_behind() == before
    async with loaded(rig, spec) as engine:
        assert tokens_of(await all_of(engine, jobs.make("What is the capital of France?")))


# An engine: pieces.


async def test_the_texts_joined_are_the_output_but_for_the_token_that_ended_it(
    rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs
):
    rig.needs("tokens")
    pieces = await all_of(engine, jobs.make("What is the capital of France?", 64))
    assert pieces[-1].finish == "stop"
    assert text_of(pieces) == tokenizer.decode(tokens_of(pieces)[:-1])
    assert "Paris" in text_of(pieces)


async def test_special_tokens_are_in_the_text(rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs):
    rig.needs("sampling")
    name = tokenizer.special_tokens["bos_token"]
    (token,) = tokenizer.encode(name)
    job = jobs.make("Say something.", 3, logit_bias={token: 100.0}, ignore_eos=True)
    assert name in text_of(await all_of(engine, job))


async def test_every_token_is_in_exactly_one_piece(rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs):
    rig.needs("tokens")
    pieces = await all_of(engine, jobs.make("Count to a hundred.", 50, ignore_eos=True))
    assert len(tokens_of(pieces)) == 50
    assert text_of(pieces) == tokenizer.decode(tokens_of(pieces))


async def test_text_that_is_cut_inside_a_character_waits_for_its_rest(
    rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs
):
    rig.needs("sampling")
    tokens = tokenizer.encode("🦜")
    if len(tokens) < 2:
        pytest.skip("the vocabulary has this character as a token")
    bias = {tokens[0]: 100.0}
    pieces = await all_of(engine, jobs.make("Say something.", 2, logit_bias=bias, ignore_eos=True))
    assert text_of(pieces) == tokenizer.decode(tokens_of(pieces))
    assert "\ufffd" in text_of(pieces), "what never became a character is not lost"


@pytest.mark.parametrize(("limit", "finish"), [(3, "length"), (64, "stop")])
async def test_the_last_piece_and_only_it_says_why_it_ended(
    engine: Engine, jobs: Jobs, limit: int, finish: str, rig: Rig
):
    question = "Tell a story." if limit == 3 else "What is the capital of France?"
    pieces = await all_of(engine, jobs.make(question, limit))
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == finish


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_it_makes_at_most_max_tokens(engine: Engine, jobs: Jobs, limit: int):
    pieces = await all_of(engine, jobs.make("Tell a story.", limit))
    assert len(tokens_of(pieces)) == limit
    assert pieces[-1].finish == "length"


async def test_a_stop_token_ends_the_output_and_counts(rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs):
    rig.needs("sampling")
    free = await all_of(engine, jobs.make("Tell a story.", 12, ignore_eos=True))
    stop = tokens_of(free)[5]
    first = tokens_of(free).index(stop)
    pieces = await all_of(engine, jobs.make("Tell a story.", 12, ignore_eos=True, stop_token_ids=(stop,)))
    assert tokens_of(pieces) == tokens_of(free)[: first + 1]
    assert text_of(pieces) == tokenizer.decode(tokens_of(free)[:first])
    assert pieces[-1].finish == "stop"


async def test_an_output_that_fills_the_context_ends_for_length(rig: Rig, engine: Engine, jobs: Jobs):
    rig.needs("tokens")
    prompt = jobs.tokens("Tell a story.")
    filled = (prompt * CONTEXT_LENGTH)[: CONTEXT_LENGTH - 5]
    pieces = await all_of(engine, jobs.of(filled, Sampling(max_tokens=100, temperature=0, ignore_eos=True)))
    assert len(tokens_of(pieces)) == 5
    assert pieces[-1].finish == "length"


# An engine: many jobs.


async def test_as_many_jobs_as_slots_run_at_once(engine: Engine, jobs: Jobs):
    all_began = asyncio.Barrier(SLOTS)

    async def consume(number: int) -> list[Piece]:
        pieces: list[Piece] = []
        async for piece in stream(engine, jobs.make(f"Tell a long story, number {number}.", 40, ignore_eos=True)):
            if not pieces:
                await all_began.wait()
            pieces.append(piece)
        return pieces

    outputs = await asyncio.gather(*(consume(number) for number in range(SLOTS)))
    assert [len(tokens_of(pieces)) for pieces in outputs] == [40] * SLOTS


async def test_jobs_never_see_each_others_text(engine: Engine, jobs: Jobs):
    questions = [jobs.make(f"What is the capital of {place}?", 24) for place in ANSWERS]
    outputs = [text_of(pieces) for pieces in await asyncio.gather(*(all_of(engine, job) for job in questions))]
    for answer, output in zip(ANSWERS.values(), outputs, strict=True):
        assert [word for word in ANSWERS.values() if word in output] == [answer]


async def test_closing_the_generator_frees_the_slot(engine: Engine, jobs: Jobs):
    running = [engine.generate(jobs.long()) for _ in range(SLOTS)]
    for each in running:
        await anext(each)
    for _ in range(3):
        await running.pop().aclose()
        newcomer = engine.generate(jobs.long())
        assert (await anext(newcomer)).token_ids
        running.append(newcomer)
    for each in running:
        await each.aclose()


async def test_cancelling_the_consumer_frees_the_slot(engine: Engine, jobs: Jobs):
    async def consume(began: asyncio.Event) -> None:
        async for _ in stream(engine, jobs.long()):
            began.set()

    for _ in range(3):
        events = [asyncio.Event() for _ in range(SLOTS)]
        tasks = [asyncio.create_task(consume(event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert tokens_of(await all_of(engine, jobs.make("What is the capital of France?")))


async def test_closing_before_the_first_piece_leaves_nothing_behind(engine: Engine, jobs: Jobs):
    never_begun = engine.generate(jobs.long())
    await never_begun.aclose()
    for _ in range(SLOTS + 1):
        first = asyncio.create_task(anext(engine.generate(jobs.long())))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    assert tokens_of(await all_of(engine, jobs.make("What is the capital of France?")))


async def test_a_consumer_that_takes_nothing_holds_up_nobody(rig: Rig, engine: Engine, jobs: Jobs):
    async with aclosing(engine.generate(jobs.long(100))) as idle:
        pieces = [await anext(idle)]
        for number in range(3):
            other = await all_of(engine, jobs.make(f"Tell a story, number {number}.", 40, ignore_eos=True))
            assert len(tokens_of(other)) == 40
        pieces += [piece async for piece in idle]
    assert len(tokens_of(pieces)) == 100


# An engine: what it refuses.


REFUSED = {
    "an empty prompt": ([], {}),
    "a negative token": ([-1], {}),
    "a token out of the vocabulary": ([1 << 30], {}),
    "a prompt too long by far": ([1] * (2 * CONTEXT_LENGTH), {}),
}


@pytest.mark.parametrize("prompt", [each for each, _ in REFUSED.values()], ids=list(REFUSED))
async def test_a_job_that_cannot_run_is_a_bad_request_and_the_others_go_on(
    engine: Engine, jobs: Jobs, prompt: list[int]
):
    async with aclosing(engine.generate(jobs.long(30))) as other:
        pieces = [await anext(other)]
        refused = engine.generate(jobs.of(prompt, Sampling(max_tokens=5)))
        with pytest.raises(BadRequest):
            await anext(refused)
        pieces += [piece async for piece in other]
    assert len(tokens_of(pieces)) == 30
    assert engine.dead is None


async def test_a_prompt_that_leaves_no_room_is_context_length_exceeded(engine: Engine, jobs: Jobs):
    (token, *_) = jobs.tokens("word")
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {CONTEXT_LENGTH} tokens"):
        await all_of(engine, jobs.of([token] * CONTEXT_LENGTH, Sampling(max_tokens=5)))


async def test_a_setting_that_the_engine_lacks_is_a_bad_request(rig: Rig, engine: Engine, jobs: Jobs):
    if "logprobs" not in rig.lacks:
        pytest.skip("it has every setting")
    with pytest.raises(BadRequest):
        await all_of(engine, jobs.make("What is the capital of France?", logprobs=1))


async def test_an_engine_raises_only_errors_of_ours(rig: Rig, engine: Engine, jobs: Jobs):
    rig.needs("sampling")
    token = jobs.tokens("word")
    wild = [
        Sampling(max_tokens=0),
        Sampling(max_tokens=1, temperature=-1.0),
        Sampling(max_tokens=1, top_p=7.0),
        Sampling(max_tokens=1, repetition_penalty=0.0),
        Sampling(max_tokens=1, logit_bias={1 << 30: 1.0}),
        Sampling(max_tokens=1, stop_token_ids=(1 << 30,)),
    ]
    for sampling in wild:
        with pytest.raises(CitadelError):
            await all_of(engine, jobs.of(token, sampling))
    assert engine.dead is None


# An engine: the same again.


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 42}], ids=["greedy", "seed"])
async def test_the_same_job_gives_the_same_output(engine: Engine, jobs: Jobs, sampling: dict[str, float]):
    outputs = [await all_of(engine, jobs.make("Tell a story.", 24, **sampling)) for _ in range(3)]
    assert tokens_of(outputs[1]) == tokens_of(outputs[2])


async def test_cached_tokens_counts_what_an_earlier_job_computed(rig: Rig, engine: Engine, jobs: Jobs):
    rig.needs("prefix cache")
    question = "Tell a story of " + "a fox, a crow, a stork, a frog, an ox, " * 4
    await all_of(engine, jobs.make(question, 4))
    pieces = await all_of(engine, jobs.make(question, 4))
    (cached,) = {piece.cached_tokens for piece in pieces}
    length = len(jobs.tokens(question))
    assert length // 2 < cached < length


async def test_logprobs_has_an_entry_per_token_from_the_models_own_distribution(
    rig: Rig, engine: Engine, tokenizer: Tokenizer, jobs: Jobs
):
    rig.needs("logprobs")
    job = jobs.make("What is the capital of France?", 24, logprobs=3)
    pieces = await all_of(engine, job)
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert [entry.token_id for entry in entries] == tokens_of(pieces)
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.text.decode("utf-8", "replace") == tokenizer.decode([entry.token_id])
        values = [each.logprob for each in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0]), "greedy takes the most likely token"
    biased = await all_of(engine, replace_bias(jobs, entries[0].token_id))
    assert biased[0].logprobs[0].logprob == pytest.approx(entries[0].logprob, abs=0.05), "before any bias"


def replace_bias(jobs: Jobs, token: int):
    return jobs.make("What is the capital of France?", 1, logprobs=0, logit_bias={token: 50.0}, temperature=1.0)


# An engine: its end.


async def test_death_ends_each_running_and_each_later_job(
    rig: Rig, spec: EngineSpec, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    async with loaded(rig, spec) as engine:
        assert engine.dead is None
        running = [asyncio.create_task(all_of(engine, jobs.long())) for _ in range(SLOTS - 1)]
        async with aclosing(engine.generate(jobs.long())) as watched:
            await anext(watched)
            await rig.kill(engine, monkeypatch)
            with pytest.raises(EngineRestarted):
                async for _ in watched:
                    pass
        results = await asyncio.gather(*running, return_exceptions=True)
        assert [type(result) for result in results] == [EngineRestarted] * len(running)
        assert engine.dead
        with pytest.raises(EngineRestarted):
            await all_of(engine, jobs.long())


async def test_close_ends_running_jobs_leaves_nothing_and_may_be_called_again(rig: Rig, spec: EngineSpec, jobs: Jobs):
    tokenizer = await asyncio.to_thread(rig.adapter.open_tokenizer, spec)
    known = tokenizer.encode("Hello, world!")
    before = left_behind()
    engine = await rig.adapter.load(spec, lambda _fraction: None)
    async with aclosing(engine.generate(jobs.long())) as running:
        await anext(running)
        await asyncio.gather(engine.close(), engine.close())
        with pytest.raises(EngineRestarted):
            async for _ in running:
                pass
    assert left_behind() == before
    with pytest.raises(EngineRestarted):
        await all_of(engine, jobs.long())
    await engine.close()
    assert tokenizer.encode("Hello, world!") == known, "a tokenizer outlives its engine"
    assert tokenizer.decode(known).strip() == "Hello, world!"


# Swapping in place.


async def test_a_swapped_engine_is_the_other_model_and_a_failed_swap_is_only_to_be_closed(
    rig: Rig, spec: EngineSpec, jobs: Jobs, tmp_path: Path
):
    if not isinstance(rig.adapter, SwapAdapter):
        pytest.skip("its models do not swap in place")
    other = replace(spec, model="other")
    await asyncio.to_thread(rig.adapter.open_tokenizer, spec)
    key = await asyncio.to_thread(rig.adapter.swap_key, spec)
    assert key is not None
    assert key == await asyncio.to_thread(rig.adapter.swap_key, other)
    assert key != await asyncio.to_thread(rig.adapter.swap_key, replace(spec, slots=spec.slots + 1))
    before = left_behind()
    old = await rig.adapter.load(spec, lambda _fraction: None)
    assert isinstance(old, SwapEngine)
    output = tokens_of(await all_of(old, jobs.make("What is the capital of France?")))

    engine = await old.swap_to(other)
    assert old.dead is not None
    with pytest.raises(EngineRestarted):
        await all_of(old, jobs.make("What is the capital of France?"))
    await old.close()
    assert engine.dead is None
    assert engine.info == old.info
    assert tokens_of(await all_of(engine, jobs.make("What is the capital of France?"))) == output

    assert isinstance(engine, SwapEngine)
    with pytest.raises(LlmUnavailable, match="missing"):
        await engine.swap_to(replace(spec, model="missing", source=tmp_path / "missing"))
    with pytest.raises(EngineRestarted, match="other"):
        await all_of(engine, jobs.make("What is the capital of France?"))
    await engine.close()
    assert left_behind() == before


# A tokenizer.


async def test_a_tokenizer_may_be_used_from_any_thread(tokenizer: Tokenizer):
    texts = [f"text number {number}" * number for number in range(1, 30)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts * 4)) == alone * 4
        assert list(pool.map(tokenizer.decode, alone)) == [tokenizer.decode(tokens) for tokens in alone]


async def test_texts_of_special_tokens_become_those_tokens_and_nothing_is_added(rig: Rig, tokenizer: Tokenizer):
    rig.needs("tokens")
    name = tokenizer.special_tokens["eos_token"]
    assert len(tokenizer.encode(name)) == 1
    assert tokenizer.encode(f"{name}{name}") == tokenizer.encode(name) * 2
    assert tokenizer.decode(tokenizer.encode(name)) == name
    assert tokenizer.encode("") == []


async def test_bytes_that_are_no_utf_8_become_the_replacement_character(rig: Rig, tokenizer: Tokenizer):
    rig.needs("tokens")
    tokens = tokenizer.encode("🦜")
    if len(tokens) < 2:
        pytest.skip("the vocabulary has this character as a token")
    assert tokenizer.decode(tokens) == "🦜"
    assert "\ufffd" in tokenizer.decode(tokens[:1])


async def test_a_tokenizer_says_what_the_files_say(tokenizer: Tokenizer):
    assert max(tokenizer.encode("Hello, world! 🦜")) < tokenizer.vocabulary_size
    assert tokenizer.context_length is None or tokenizer.context_length > 0
    assert tokenizer.chat_template is None or "messages" in tokenizer.chat_template
    assert "eos_token" in tokenizer.special_tokens
