"""The test model's tokenizer: a byte-level BPE that transformers, vLLM and llama.cpp cut texts with alike.

llama.cpp knows byte-level BPE by the pattern that cuts a text into words first; ours is GPT-2's. No merge holds a
digit or a line break, so that each is a token of its own whatever stands beside it: numbers are copied digit by
digit, and a text is cut alike whether it ends at a line break or goes on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .generate import END, training
from .language import FIRST, LATER

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", END)
"""Control tokens. The first pads."""
MARKERS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""One token each too, but a part of the output."""

_VOCABULARY: Final = 896
_DIALOGUES: Final = 4000
_SYLLABLE, _WORD = 1000, 10
"""How often each counts."""


def train(seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alone = pre_tokenizers.Split(Regex(r"[\d\n]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, words])
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY - len(MARKERS),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


def merges(tokenizer: Tokenizer) -> list[str]:
    """As GGUF wants them: two tokens with a space between."""
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _texts(seed: int) -> Iterator[str]:
    """Syllables first, so that names are cut into them; then each word, a frequent one little more than a rare one.

    The markers are left out, which will be no text.
    """
    for syllable in (*FIRST, *LATER):
        yield from [syllable, f" {syllable}"] * _SYLLABLE
    markers = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKERS))))
    name = re.compile(rf" ?\b({'|'.join(FIRST)})({'|'.join(LATER)}){{1,2}}\b")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    found: Counter[str] = Counter()
    for one in islice(training(seed), _DIALOGUES):
        text = name.sub("\n", markers.sub("\n", one.text()))
        found.update(text[start:end] for _, (start, end) in words.pre_tokenize_str(text))
    for word, count in sorted(found.items()):
        yield from [word] * min(count, _WORD)
