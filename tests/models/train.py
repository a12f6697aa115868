"""Trains the test model from scratch: `python -m tests.models.train FOLDER`, under an hour on one core.

The folder keeps a log and checkpoints; started again, it goes on from the last one. `export` makes the model's files
of what it leaves.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, pad
from transformers import Qwen3Config, Qwen3ForCausalLM

from . import tokenizer as tokens
from .generate import END, Dialogue, training, unseen
from .language import NO_TOOL

SEED: Final = 1
CONTEXT_LENGTH: Final = 1024


def _any(_one: Dialogue) -> bool:
    return True


def _tiny(one: Dialogue) -> bool:
    return len(one.messages) <= 3 and len(one.tools) <= 1


def _short(one: Dialogue) -> bool:
    return len(one.messages) <= 6 and len(one.tools) <= 3


def _choosing(one: Dialogue) -> bool:
    """One question, and either many tools or none that fits."""
    asked = sum(message.role == "user" for message in one.messages)
    return asked == 1 and bool(one.tools) and (len(one.tools) > 2 or one.messages[-1].content == NO_TOOL)


@dataclass(frozen=True, slots=True)
class Stage:
    """For so many steps, dialogues that are `wanted`, in batches of about so many tokens."""

    steps: int
    batch_tokens: int
    wanted: Callable[[Dialogue], bool]


STAGES: Final = (
    # Copying is learnt first, on the shortest dialogues, where there is least to look at.
    Stage(500, 1536, _tiny),
    Stage(500, 3072, _short),
    Stage(1200, 4096, _any),
    # What stays wrong for long is whether a tool for the question is among those offered.
    Stage(500, 2048, _choosing),
    Stage(800, 4096, _any),
)
_RATES: Final = ((0, 0.02), (49, 1.0), (1000, 1.0), (2200, 0.2), (2250, 0.4), (2700, 0.4), (3500, 0.0))
"""The share of the full learning rate at a step; between two it changes evenly."""

_MUON_RATE, _ADAM_RATE = 0.01, 1e-3
_POOL: Final = 256
"""Dialogues that are sorted by length at once, so that a batch has little padding."""
_LONGEST: Final = 512
_IGNORED: Final = -100
_EXAMINED: Final = 200
_EVERY: Final = 100

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """`targets` are the tokens to say next, `_IGNORED` where the assistant is not speaking."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Encoder:
    """Dialogues to token ids, and which of them are the assistant's own words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.token_to_id(END)
        self._opened = self.ids("<|im_start|>assistant\n<think>\n")
        self._closed = self.ids("\n</think>\n\n")

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def example(self, dialogue: Dialogue) -> tuple[list[int], list[int]]:
        """Inputs and targets."""
        ids = self.ids(dialogue.text())
        targets = [_IGNORED] * len(ids)
        for start, end in self._spans(ids):
            targets[start - 1 : end - 1] = ids[start:end]
        return ids, targets

    def _spans(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Each answer from where its prompt ends, up to and with the token that ends it."""
        at = 0
        while at < len(ids):
            if not _stands(ids, at, self._opened):
                at += 1
                continue
            start = at + len(self._opened)
            if _stands(ids, start, self._closed):
                start += len(self._closed)
            at = ids.index(self._end, start) + 1
            yield start, at


def _stands(ids: list[int], at: int, part: list[int]) -> bool:
    return ids[at : at + len(part)] == part


def new_model(vocabulary: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def prepare(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Weights to start from that make copying easy to learn, which takes most of the time otherwise.

    A token's output vector is its input vector; a word is like itself without the space before it; and attention
    passes on what it looks at, and looks for what is alike (Trockman and Kolter 2023, "Mimetic Initialization").
    """
    words = tokenizer.get_vocab()
    vectors, space = torch.randn(len(words), 128), torch.randn(128)
    for word, at in words.items():
        if (bare := words.get(word.removeprefix("\u0120"))) not in (None, at):
            vectors[at] = 0.8 * vectors[bare] + 0.7 * space
    model.model.embed_tokens.weight.copy_(0.5 * vectors)
    model.lm_head.weight.copy_(0.1 * vectors)
    for depth, layer in enumerate(model.model.layers):
        attention: Any = layer.self_attn
        values, keys, others = (_orthogonal(64, 128).split(32) for _ in range(3))
        attention.v_proj.weight.copy_(torch.cat(values))
        attention.o_proj.weight.copy_(0.25 * torch.cat([values[0], values[0], values[1], values[1]]).T)
        attention.k_proj.weight.copy_(torch.cat(keys))
        if depth:
            attention.q_proj.weight.copy_(torch.cat([keys[0], others[0], keys[1], others[1]]))


def _orthogonal(rows: int, columns: int) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(rows, columns))


# Batches.


def batches(encoder: Encoder, seed: int, done: int = 0) -> Iterator[Batch]:
    """Of all stages, one after the other, without the first ones that are done."""
    for number, stage in enumerate(STAGES):
        if done < stage.steps:
            yield from islice(_batches_of(stage, encoder, 1000 * seed + number), done, stage.steps)
        done = max(0, done - stage.steps)


def _batches_of(stage: Stage, encoder: Encoder, seed: int) -> Iterator[Batch]:
    """Without end. Of about as many tokens each, and of dialogues of about one length."""
    dialogues, rng = training(seed, stage.wanted), Random(seed)
    while True:
        examples = [encoder.example(one) for one in islice(dialogues, _POOL)]
        examples = sorted((one for one in examples if len(one[0]) <= _LONGEST), key=lambda one: len(one[0]))
        made = list(_cut(examples, stage.batch_tokens))
        rng.shuffle(made)
        yield from made


def _cut(examples: Sequence[tuple[list[int], list[int]]], most_tokens: int) -> Iterator[Batch]:
    rest = list(examples)
    while rest:
        count = max(1, most_tokens // _padded(len(rest[-1][0])))
        yield batch(rest[-count:])
        del rest[-count:]


def _padded(length: int) -> int:
    return -(-length // 16) * 16


def batch(examples: Sequence[tuple[list[int], list[int]]]) -> Batch:
    width = _padded(max(len(ids) for ids, _ in examples))
    inputs = [pad(torch.tensor(ids), (0, width - len(ids))) for ids, _ in examples]
    targets = [pad(torch.tensor(each), (0, width - len(each)), value=_IGNORED) for _, each in examples]
    return Batch(torch.stack(inputs), torch.stack(targets))


# Learning.


class Trainer:
    def __init__(self, model: Qwen3ForCausalLM, folder: Path) -> None:
        self.model = model
        self.step = 0
        self._file = folder / "checkpoint.pt"
        matrices = [each for each in model.model.layers.parameters() if each.ndim == 2]
        known = {id(each) for each in matrices}
        others = [each for each in model.parameters() if id(each) not in known]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.01),
            torch.optim.AdamW(others, lr=_ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )
        self._rates = (_MUON_RATE, _ADAM_RATE)

    def learn(self, batch: Batch) -> float:
        spoken = batch.targets.flatten() != _IGNORED
        hidden = self.model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden.flatten(0, 1)[spoken])
        loss = cross_entropy(logits, batch.targets.flatten()[spoken])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * _share(self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def save(self) -> None:
        state = {"step": self.step, "model": self.model.state_dict()}
        state["optimizers"] = [each.state_dict() for each in self._optimizers]
        new = self._file.with_suffix(".new")
        torch.save(state, new)
        new.replace(self._file)

    def resume(self) -> None:
        if not self._file.is_file():
            return
        state = torch.load(self._file)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def _share(step: int) -> float:
    """Of the full learning rate."""
    for (start, low), (end, high) in pairwise(_RATES):
        if step <= end:
            return low + (high - low) * (step - start) / (end - start)
    return 0.0


@torch.no_grad()
def examine(model: Qwen3ForCausalLM, encoder: Encoder, dialogues: Sequence[Dialogue]) -> list[bool]:
    """Whether each is exactly right: greedy text is the expected one if each token is the likeliest after those
    before it, so that no text need be made."""
    order = sorted(range(len(dialogues)), key=lambda at: len(dialogues[at].text()))
    right = [False] * len(dialogues)
    for some in (order[at : at + 16] for at in range(0, len(order), 16)):
        made = batch([encoder.example(dialogues[at]) for at in some])
        chosen = model(input_ids=made.inputs).logits.argmax(-1)
        same = ((chosen == made.targets) | (made.targets == _IGNORED)).all(-1).tolist()
        for at, value in zip(some, same, strict=True):
            right[at] = value
    return right


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=folder / "log", level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = tokens.train(SEED)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    model = new_model(tokenizer.get_vocab_size())
    prepare(model, tokenizer)
    trainer = Trainer(model, folder)
    trainer.resume()
    examined = unseen(_EXAMINED, seed=SEED)
    _log.info("%d parameters, from step %d", sum(each.numel() for each in trainer.model.parameters()), trainer.step)
    began, losses = time.monotonic(), []
    for one in batches(encoder, SEED, trainer.step):
        losses.append(trainer.learn(one))
        if trainer.step % (_EVERY // 5) == 0:
            _log.info("step %d loss %.4f, %.0f s", trainer.step, sum(losses) / len(losses), time.monotonic() - began)
            losses.clear()
        if trainer.step % _EVERY == 0:
            trainer.save()
            right = examine(trainer.model, encoder, examined)
            _log.info("step %d: %d of %d dialogues right", trainer.step, sum(right), len(right))
    trainer.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
