"""THE STORY of one call, from who asks what to the last event: limits, prompt, model, slot, generation, usage.

The order of the steps is part of the contract, since the first check that fails is the answer. Everything a call
takes is taken by an `async with` or `with` below, and given back in the opposite order however the call ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import structlog

from citadel import reasoning
from citadel.accounts.auth import Account
from citadel.accounts.quota import Ledger, Reservation
from citadel.aio import merge
from citadel.config import Model, SamplingDefaults
from citadel.engine import EmbedJob, EngineInfo, Job, Piece, Sampling, Tokenizer
from citadel.errors import BadRequest, ContextLengthExceeded, EngineRestarted, LlmUnavailable, ModelNotFound
from citadel.messages import (
    AnswerEvent,
    CallEvent,
    ChatRequest,
    Delta,
    Done,
    Embedded,
    EmbedRequest,
    Started,
    Usage,
)
from citadel.metrics import Metrics
from citadel.runtime.entry import Ticket
from citadel.runtime.installed import Prepared
from citadel.runtime.registry import Registry
from citadel.text import formats, inputs, prompts
from citadel.text.prompts import Grammars, Prompt, Spoken
from citadel.text.reader import Reader

log = structlog.get_logger("citadel.pipeline")

_INLINE_BYTES: Final = 8_192
"""The prompt of a body up to this long is rendered and tokenized on the event loop, in a few milliseconds."""


SAMPLING_NAMES: Final = tuple(SamplingDefaults.model_fields)


R = TypeVar("R", ChatRequest, EmbedRequest)


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """`id` goes into the answer and, with the choice's number, to the engine. `wait_s` is for the model to load.

    `body_bytes` of the request: how much work the prompt can be.
    """

    id: str
    account: Account
    request: R
    wait_s: float
    body_bytes: int


AnyCall = Call[ChatRequest] | Call[EmbedRequest]
Texts = list[Sequence[int]]
"""Of a call for embeddings: the tokens of each input."""
Say = Callable[[CallEvent], Awaitable[None]]
"""Takes the next event of an answer. It must not wait for a reader, since the engine's next piece waits for it."""
SayAnswer = Callable[[AnswerEvent], Awaitable[None]]


class Pipeline:
    def __init__(self, registry: Registry, ledger: Ledger, metrics: Metrics) -> None:
        self._registry = registry
        self._ledger = ledger
        self._metrics = metrics
        self._formats: dict[tuple[str, bool], Spoken] = {}
        """By model, and whether it is offered tools."""
        self._grammars = Grammars()
        self._warm = False
        """Whether the template renderer has been imported."""

    async def run(self, call: AnyCall, say: Say) -> None:
        """Say the events of the answer. What is raised before the first event can still have a status of its own.

        A `say` that raises ends the call; ConnectionError: there is nobody left to answer.
        """
        request = call.request
        with self._metrics.call(request.model) as measured:
            settings = self._settings(request)
            _check_task(request, settings)
            limits = call.id, call.account, request.model, settings.effective_max_parallel
            with self._ledger.reserve(*limits) as reservation:
                prepared = await self._registry.prepare(request.model)
                prompt = await self._prompt(call, settings, prepared) if prepared is not None else None
                reservation.prompt_ready = prompt is not None
                async with self._registry.call(request.model, call.account.member, request.n) as ticket:
                    every_s = self._registry.config.server.comment_s
                    async with aclosing(self._registry.wait(ticket, call.wait_s, every_s)) as waiting:
                        async for status in waiting:
                            await say(status)
                    if prompt is None:  # the weights came only now, and the tokenizer with them
                        prompt = await self._prompt(call, settings, await self._registry.prepare(request.model))
                    reservation.prompt_ready = reservation.model_ready = True

                    async def answer(event: AnswerEvent) -> None:
                        """What was made so far is paid for, however the call ends."""
                        _charge(reservation, event)
                        self._metrics.saw(measured, event.usage)
                        await say(event)

                    try:
                        await self._answer(call, settings, prompt, ticket, answer)
                    except EngineRestarted as error:
                        reason = ticket.failure or str(error.fields["reason"])
                        raise EngineRestarted(request.model, reason) from error

    async def tokenizer(self, model: str) -> Tokenizer:
        return (await self._installed(model)).tokenizer

    async def tokens(self, request: ChatRequest, body_bytes: int) -> list[int]:
        """The prompt that `request` would have, however long. Nothing is loaded for it."""
        settings = self._settings(request)
        prepared = await self._installed(request.model)
        return (await self._rendered(request, body_bytes, settings, prepared)).token_ids

    async def _installed(self, model: str) -> Prepared:
        prepared = await self._registry.prepare(model)
        if prepared is None:
            raise LlmUnavailable(model, "its weights are not here yet")
        return prepared

    def _settings(self, request: ChatRequest | EmbedRequest) -> Model:
        """The model's, for a request that it can serve."""
        models = self._registry.config.models
        if request.model not in models:  # models.toml was read again since the name was looked up
            raise ModelNotFound(request.requested_model, list(models))
        slots = self._registry.status(request.model).slots
        if request.n > slots:
            raise BadRequest(f"n: {request.model} has {slots} slots, fewer than {request.n}", param="n")
        return models[request.model]

    async def _prompt(self, call: AnyCall, settings: Model, prepared: Prepared | None) -> Prompt | Texts:
        assert prepared is not None
        request = call.request
        limit = self._registry.status(request.model).context_length or prepared.tokenizer.context_length
        if isinstance(request, EmbedRequest):
            reading = request, prepared.tokenizer, limit
            small = call.body_bytes <= _INLINE_BYTES
            return inputs.tokens(*reading) if small else await asyncio.to_thread(inputs.tokens, *reading)
        prompt = await self._rendered(request, call.body_bytes, settings, prepared)
        if limit is not None and len(prompt.token_ids) >= limit:
            raise ContextLengthExceeded(limit, len(prompt.token_ids))
        return replace(prompt, grammar=await self._grammar(request, prompt, prepared.tokenizer))

    async def _rendered(self, request: ChatRequest, body_bytes: int, settings: Model, prepared: Prepared) -> Prompt:
        spoken = self._format(request.model, settings.format, prepared, calls=bool(request.tools))
        making = request, prepared.chat_template, spoken
        if self._warm and body_bytes <= _INLINE_BYTES:
            return prompts.make(*making)
        prompt = await asyncio.to_thread(prompts.make, *making)
        self._warm = self._warm or request.prompt is None  # a prompt as it is needs no renderer
        return prompt

    async def _grammar(self, request: ChatRequest, prompt: Prompt, tokenizer: Tokenizer) -> str | None:
        """What the output is held to; None where it is free."""
        key = prompts.grammar_key(request, prompt)
        if key is None:
            return None
        if key not in self._grammars:
            made = await asyncio.to_thread(prompts.compile_for, request, prompt, tokenizer)
            for path in self._grammars.keep(key, made):
                log.warning("schema keyword not enforced", model=request.model, keyword=path)
        grammar = self._grammars[key]
        return grammar and grammar.text

    def _format(self, model: str, name: str, prepared: Prepared, *, calls: bool) -> Spoken:
        """The configured format, or the one that the template and the special tokens are recognised by."""
        known = self._formats.get((model, calls))
        if known is not None:
            if known.tokenizer is prepared.tokenizer:
                return known
            self.forget_formats()  # the model's files are others by now
        special_tokens = tuple(prepared.tokenizer.special_tokens.values())
        found = formats.FORMATS.get(name) or formats.recognise(prepared.chat_template, special_tokens)
        used = prompts.with_calls(found, prepared.chat_template) if calls else found
        self._formats[model, calls] = spoken = prompts.spoken(used, prepared.tokenizer)
        log.info("format", model=model, format=used.name, configured=name, for_calls=calls)
        return spoken

    def forget_formats(self) -> None:
        """The configuration has changed, and with it perhaps the model: grammars name its tokens."""
        self._formats.clear()
        self._grammars = Grammars()

    def format_of(self, model: str) -> str | None:
        """The name of the format that the model's output is read in; None until it is recognised."""
        name = self._registry.config.models[model].format
        used = self._formats.get((model, False)) or self._formats.get((model, True))
        return used.format.name if used is not None else (None if name == "auto" else name)

    async def _answer(
        self, call: AnyCall, settings: Model, prompt: Prompt | Texts, ticket: Ticket, say: SayAnswer
    ) -> None:
        if isinstance(prompt, Prompt):
            assert isinstance(call.request, ChatRequest)
            await self._generate(call.id, call.request, settings, prompt, ticket, say)
        else:
            await self._embed(call.id, prompt, ticket, say)

    async def _embed(self, id_: str, texts: Texts, ticket: Ticket, say: SayAnswer) -> None:
        engine, usage, unread, made = ticket.engine, Usage(), sum(map(len, texts)), 0
        self._registry.listen(ticket, unread)
        async with aclosing(engine.embed(EmbedJob(id_, texts))) as vectors:
            async for vector in vectors:
                self._registry.heard(ticket)
                if made == 0:
                    await say(Started(engine.info.fingerprint, usage))
                usage, made = Usage(prompt=usage.prompt + len(texts[made])), made + 1
                await say(Embedded(vector, usage))
                self._registry.listen(ticket, unread - usage.prompt)
        await say(Done(usage))

    async def _generate(
        self, id_: str, request: ChatRequest, settings: Model, prompt: Prompt, ticket: Ticket, say: SayAnswer
    ) -> None:
        engine = ticket.engine
        sampling = _sampling(request, settings, engine.info, len(prompt.token_ids))
        readers = [Reader(prompt.reading) for _ in range(request.n)]
        jobs = [
            Job(f"{id_}-{choice}", prompt.token_ids, _seeded(sampling, choice), prompt.grammar)
            for choice in range(request.n)
        ]
        budget = self._budget(request, settings, prompt)
        outputs = [
            engine.generate(job) if budget is None else reasoning.bounded(engine, job, reader, budget)
            for job, reader in zip(jobs, readers, strict=True)
        ]
        usage, started = Usage(prompt=len(prompt.token_ids)), False

        async def take(choice: int, piece: Piece) -> None:
            """Say what the choice's next piece makes known."""
            nonlocal usage, started
            self._registry.heard(ticket)
            if not started:
                started = True
                await say(Started(engine.info.fingerprint, usage))
            events = readers[choice].feed(piece)
            usage = _usage(usage, readers, piece)
            for event in events:
                await say(Delta(choice, event, usage))

        self._registry.listen(ticket, len(prompt.token_ids))
        if len(outputs) == 1:
            async with aclosing(outputs[0]) as pieces:
                async for piece in pieces:
                    await take(0, piece)
                    if readers[0].finished:
                        break
        else:
            async with aclosing(merge(outputs, lambda choice: readers[choice].finished)) as numbered:
                async for choice, piece in numbered:
                    await take(choice, piece)
        for complaint in (each for reader in readers for each in reader.complaints):
            log.warning("unreadable output", model=request.model, why=complaint)
        await say(Done(usage))

    def _budget(self, request: ChatRequest, settings: Model, prompt: Prompt) -> reasoning.Budget | None:
        """The bound on the reasoning, where the model's owner has set one and its output is read for reasoning."""
        fmt = prompt.reading.format
        if settings.reasoning_budget is None or not fmt.thinking:
            return None
        answering = replace(prompt, reading=replace(prompt.reading, in_reasoning=False), thinking=())

        async def grammar() -> str | None:
            return await self._grammar(request, answering, prompt.tokenizer)

        return reasoning.Budget(settings.reasoning_budget, fmt, prompt.tokenizer, grammar)


def _check_task(request: ChatRequest | EmbedRequest, settings: Model) -> None:
    if isinstance(request, EmbedRequest) != (settings.task == "embed"):
        does = "makes embeddings and no text" if settings.task == "embed" else "makes text and no embeddings"
        route = "/v1/embeddings" if settings.task == "embed" else "/v1/chat/completions"
        raise BadRequest(f"model: {request.requested_model} {does}; its route is {route}", param="model")


def _sampling(request: ChatRequest, settings: Model, info: EngineInfo, prompt_tokens: int) -> Sampling:
    """The request's values, else the owner's, else the checkpoint's, else OpenAI's."""
    room = info.context_length - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(info.context_length, prompt_tokens)
    asked = request.sampling
    limits = [asked.max_tokens, settings.max_output_tokens, room]
    given: dict[str, Any] = {name: value for name in SAMPLING_NAMES if (value := getattr(asked, name)) is not None}
    max_tokens = min(limit for limit in limits if limit is not None)
    chosen: dict[str, Any] = {**info.sampling_defaults, **settings.sampling.given(), **given}
    return Sampling(
        **chosen,
        max_tokens=max_tokens,
        min_tokens=min(asked.min_tokens, max_tokens),
        seed=asked.seed,
        logit_bias=asked.logit_bias,
        ignore_eos=asked.ignore_eos,
        stop_token_ids=asked.stop_token_ids,
        logprobs=asked.logprobs,
    )


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    return sampling if sampling.seed is None or choice == 0 else replace(sampling, seed=sampling.seed + choice)


def _charge(reservation: Reservation, event: AnswerEvent) -> None:
    if not isinstance(event, Started):
        reservation.answering = True
        reservation.prompt_tokens = event.usage.prompt
        reservation.completion_tokens = event.usage.completion


def _usage(before: Usage, readers: list[Reader], piece: Piece) -> Usage:
    completion = thought = 0
    for reader in readers:
        completion += reader.completion_tokens
        thought += reader.reasoning_tokens
    return Usage(before.prompt, completion, max(before.cached, piece.cached_tokens), thought)
