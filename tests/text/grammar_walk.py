"""Outputs that a grammar lets through: random walks over a vocabulary of bytes, frames' markers, and a few words."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import llguidance

from citadel.text import channels
from citadel.text.formats import Format, Tagged
from citadel.text.grammar_lark import MAYBE_TOKENS
from citadel.text.lexer import Maybe

WORDS = (
    "Oslo",
    "hello ",
    "é",
    "漢",
    "null",
    "true",
    "17",
    "-2.5",
    "2024-05-06",
    "a b",
    '"}',
    "}\n",
    "\n",
    " ",
    "<",
    "</",
    "\\n",
)
CLOSERS = '"}])>'
_END = 256


class Vocabulary:
    """Bytes, words, and markers; `special` ones are tokens that text cannot spell, as models have them."""

    def __init__(self, markers: Iterable[str], *, special: bool) -> None:
        self.eos_token_id, self.bos_token_id = _END, None
        self.tokens = [bytes([value]) for value in range(256)] + [b"<|end of output|>"]
        self.special_token_ids = [_END]
        self.ids: dict[str, int] = {}
        for marker in dict.fromkeys(markers):
            if special:
                self.ids[marker] = len(self.tokens)
                self.special_token_ids.append(len(self.tokens))
            self.tokens.append(marker.encode())
        self.heavy = range(257, len(self.tokens))
        self.tokens += [word.encode() for word in WORDS]
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def token_id(self, text: str) -> int | None:
        return self.ids.get(text)


@dataclass
class Walk:
    """One output. `ended`: the grammar let it end, within the number of steps."""

    vocabulary: Vocabulary
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def raw(self) -> bytes:
        return b"".join(self.vocabulary.tokens[token] for token in self.tokens)

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")


def matcher_of(grammar: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(grammar: str, vocabulary: Vocabulary, seed: int, *, steps: int = 1500) -> Walk:
    rng = random.Random(seed)
    matcher = matcher_of(grammar, vocabulary)
    weight = _weights(vocabulary)
    out = Walk(vocabulary)
    for step in range(steps):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(vocabulary.tokens)) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, f"nothing may follow {out.text!r}: {matcher.get_error()}"
        if _END in allowed and (len(allowed) == 1 or rng.random() < 0.1 + step / steps):
            out.ended = True
            break
        choices = [token for token in allowed if token != _END]
        token = rng.choices(choices, [weight(token) for token in choices])[0]
        assert matcher.consume_token(token), matcher.get_error()
        out.tokens.append(token)
    return out


def _weights(vocabulary: Vocabulary) -> Callable[[int], float]:
    def weight(token: int) -> float:
        if token in vocabulary.heavy:
            return 12.0
        if token >= 256:
            return 1.5
        if chr(token) in CLOSERS:
            return 6.0
        return 0.3 if 32 <= token < 127 else 0.02

    return weight


def accepts(grammar: str, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the text, its markers as tokens where they are, is a whole output of the grammar."""
    matcher = matcher_of(grammar, vocabulary)
    tokens = tokens_of(vocabulary, text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tokens_of(vocabulary: Vocabulary, text: str) -> list[int]:
    tokens: list[int] = []
    while text:
        marker = next((each for each in vocabulary.ids if text.startswith(each)), None)
        tokens += [vocabulary.ids[marker]] if marker else list(text[0].encode())
        text = text[len(marker) if marker else 1 :]
    return tokens


def markers_of(fmt: Format) -> list[str]:
    """All that the format's frames are made of."""
    found = [marker for one in fmt.thinking for marker in (one.open, one.close)]
    if fmt.channels:
        found += [*channels.MARKERS, "<|message|>", "<|constrain|>"]
    for frame in fmt.frames:
        parts = [*frame.head, *frame.tail]
        if isinstance(frame.arguments, Tagged):
            found.append(frame.arguments.close)
            parts += frame.arguments.header
        else:
            found.append(frame.arguments.quote)
        parts += [each for part in parts if isinstance(part, Maybe) for each in part.parts]
        found += [frame.open, frame.close, *(part for part in parts if isinstance(part, str))]
    return [marker for marker in found if len(marker) > 1]


def vocabulary_of(fmt: Format, *, special: bool) -> Vocabulary:
    """With `special`, what looks like a token in the markers is one, as in the family's own vocabularies."""
    markers = markers_of(fmt)
    return Vocabulary(
        [each for marker in markers for each in MAYBE_TOKENS.findall(marker)] if special else markers, special=special
    )
