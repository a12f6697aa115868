"""Choosing a token from the model's logits.

The order is vLLM's: bias, bans, penalties, grammar, temperature, then the truncations and the draw. All but the last
three change the logits in place, with numpy: llama.cpp's own samplers first copy the vocabulary into an array of
structs, and sort all of it for a `top_p` without a `top_k`. For the same reason a draw that nothing truncates is
numpy's too.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from citadel.errors import EdgeError
from citadel.messages import TokenLogprob
from engines.llama_context import DRAWN_AT_RANDOM, Chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from citadel.engine import Sampling
    from engines.llama_grammar import Matcher
    from engines.llama_native import Vocabulary

    Logits = NDArray[np.float32]

_GREEDY_BELOW: Final = 1e-5
_CANDIDATES: Final = 1024
"""How many tokens `top_p` and `min_p` look at when the job sets no `top_k`; the rest have no weight that counts."""
_BLOCK: Final = 256
"""Tokens that a plain draw weighs together, before it looks at each of those in the block that it hit."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`token` is None where nothing is allowed any more."""

    token: int | None
    logprob: TokenLogprob | None = None


class Chooser:
    """The sampling state of one job."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], vocabulary: Vocabulary, matcher: Matcher | None
    ) -> None:
        self._sampling = sampling
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._plain = PlainDraw(sampling) if is_plain(sampling) else None
        self._chain = None if self._plain else chain_of(sampling)
        self._count = 0
        self._bias = _pairs(sampling.logit_bias)
        # Only who bans them needs to know all of them, and finding them takes longer than a token.
        ends = vocabulary.ends if sampling.ignore_eos or sampling.min_tokens else frozenset[int]()
        self._ends = np.array(sorted(ends), np.intp)
        self._stops = np.array(sorted({*ends, *sampling.stop_token_ids}), np.intp)
        self._repeats = _mask(vocabulary.size, prompt) if sampling.repetition_penalty != 1.0 else None
        additive = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self._penalty = np.zeros(vocabulary.size, np.float32) if additive else None
        self._seen: set[int] = set()

    @property
    def complete(self) -> bool:
        """The grammar allows nothing but the end."""
        return self._matcher is not None and self._matcher.complete

    def stops_at(self, token: int) -> bool:
        """The output ends before the token."""
        sampling = self._sampling
        return token in sampling.stop_token_ids or (not sampling.ignore_eos and self._vocabulary.is_end(token))

    def choose(self, logits: Logits, draw: Callable[[Chain], int]) -> Choice:
        """Changes `logits`. `draw` lets a chain choose from them as they are when it is called."""
        if not np.isfinite(logits.max()):
            raise EdgeError("The model's output is not a number")
        raw = logits.copy() if self._sampling.logprobs is not None else None
        self._shape(logits)
        token = self._pick(logits, draw)
        if token is not None and self._matcher and not self._matcher.take(token):
            logits[~self._matcher.allowed()] = -np.inf
            token = self._pick(logits, draw)
            if token is not None and not self._matcher.take(token):
                raise EdgeError("The grammar refused a token that it had allowed")
        if token is None:
            return Choice(None)
        self._remember(token)
        return Choice(token, None if raw is None else self._logprob(raw, token))

    def close(self) -> None:
        if self._chain:
            self._chain.close()

    def _shape(self, logits: Logits) -> None:
        sampling = self._sampling
        if self._bias:
            tokens, values = self._bias
            logits[tokens] += values
        if self._count < sampling.min_tokens:
            logits[self._stops] = -np.inf
        if sampling.ignore_eos:
            logits[self._ends] = -np.inf
        if self._repeats is not None:
            tokens = np.flatnonzero(self._repeats)
            values = logits[tokens]
            penalty = np.float32(sampling.repetition_penalty)
            logits[tokens] = np.where(values > 0, values / penalty, values * penalty)
        if self._penalty is not None:
            logits -= self._penalty

    def _pick(self, logits: Logits, draw: Callable[[Chain], int]) -> int | None:
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            return None
        if self._plain:
            return self._plain(logits, logits[best])
        return draw(self._chain) if self._chain else best

    def _remember(self, token: int) -> None:
        self._count += 1
        if self._repeats is not None:
            self._repeats[token] = True
        if self._penalty is not None:
            if token not in self._seen:
                self._seen.add(token)
                self._penalty[token] += self._sampling.presence_penalty
            self._penalty[token] += self._sampling.frequency_penalty

    def _logprob(self, raw: Logits, token: int) -> TokenLogprob:
        highest = raw.max()
        total = float(highest) + float(np.log(np.exp(raw - highest).sum(dtype=np.float64)))
        wanted = self._sampling.logprobs or 0
        return self._entry(raw, token, total, self._top(raw, wanted, total))

    def _top(self, raw: Logits, wanted: int, total: float) -> tuple[TokenLogprob, ...]:
        if wanted == 0:
            return ()
        wanted = min(wanted, raw.size)
        likely = np.argpartition(raw, raw.size - wanted)[raw.size - wanted :]
        ordered = likely[np.argsort(-raw[likely], kind="stable")]
        return tuple(self._entry(raw, int(token), total) for token in ordered)

    def _entry(self, raw: Logits, token: int, total: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(token, self._vocabulary.piece(token), min(0.0, float(raw[token]) - total), top)


class PlainDraw:
    """Draws from the whole vocabulary at a temperature; a seed makes the draws repeat."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature: np.float32 = np.float32(sampling.temperature)
        self._random = np.random.Generator(np.random.PCG64(_seed(sampling.seed)))

    def __call__(self, logits: Logits, highest: np.float32) -> int:
        """`highest` is the largest of `logits`. What is at minus infinity is never drawn."""
        weights: Logits = np.exp((logits - highest) / self._temperature)
        starts = np.arange(0, weights.size, _BLOCK)
        block, rest = _hit(np.add.reduceat(weights, starts, dtype=np.float64), self._random.random())
        start = int(starts[block])
        token, _ = _hit(weights[start : start + _BLOCK].astype(np.float64), rest)
        return start + token


def _hit(weights: NDArray[np.float64], point: float) -> tuple[int, float]:
    """The weight that the fraction `point` of their sum lies in, and how far in it lies, as a fraction again."""
    ends = np.cumsum(weights)
    target = point * float(ends[-1])
    # Rounding may put the target on the very end, behind which there are only zeros.
    last = int(weights.nonzero()[0].max())
    index = min(int(ends.searchsorted(target, side="right")), last)
    start = float(ends[index - 1]) if index else 0.0
    return index, min(1.0, max(0.0, (target - start) / float(weights[index])))


def is_plain(sampling: Sampling) -> bool:
    """A draw that no truncation comes before."""
    truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return sampling.temperature >= _GREEDY_BELOW and not truncated


def chain_of(sampling: Sampling) -> Chain | None:
    """The chain that truncates and draws; None where the most likely token is always the one.

    Scaling by the temperature keeps the order, so `top_k` may come before it, and then little is left to scale.
    """
    if sampling.temperature < _GREEDY_BELOW:
        return None
    top_k = sampling.top_k if sampling.top_k > 0 else _CANDIDATES
    steps: list[tuple[str, tuple[float, ...]]] = [("top_k", (top_k,)), ("temp", (sampling.temperature,))]
    if sampling.min_p > 0.0:
        steps.append(("min_p", (sampling.min_p, 1)))
    if sampling.top_p < 1.0:
        steps.append(("top_p", (sampling.top_p, 1)))
    return Chain(steps, _seed(sampling.seed))


def _seed(seed: int | None) -> int:
    chosen = secrets.randbits(32) if seed is None else seed & 0xFFFFFFFF
    return 0 if chosen == DRAWN_AT_RANDOM else chosen


def _pairs(bias: Mapping[int, float]) -> tuple[NDArray[np.intp], Logits] | None:
    if not bias:
        return None
    return np.fromiter(bias, np.intp, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))


def _mask(size: int, tokens: Iterable[int]) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[np.fromiter(tokens, np.intp)] = True
    return mask
