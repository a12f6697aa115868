"""The wrapper around llama.cpp: each of the refused calls would abort the process."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import pytest

pytest.importorskip("llama_cpp")
from rigs import SMOLLM2, has_smollm2

from engines.llama_context import Batch, Chain, Context
from engines.llama_native import Model, NativeError

pytestmark = [pytest.mark.real, has_smollm2]


@pytest.fixture(scope="module")
def native() -> Generator[Context]:
    model = Model.load(SMOLLM2, {})
    context = Context(model, {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "kv_unified": False}, 2)
    yield context
    context.close()
    model.close()


def batch_of(sequence: int = 0, tokens: Sequence[int] = (1,), *, outputs: int = 1, capacity: int = 128):
    batch = Batch(capacity)
    batch.add(sequence, 0, tokens, outputs=outputs)
    return batch


@pytest.mark.parametrize(
    "wrong",
    [
        lambda native: native.decode(batch_of(tokens=[1] * 65)),
        lambda native: native.decode(batch_of(sequence=2)),
        lambda native: native.decode(batch_of(tokens=[-1])),
        lambda native: native.decode(batch_of(tokens=[49152])),
        lambda native: batch_of(tokens=[]),
        lambda native: batch_of(tokens=[1] * 129),
        lambda native: batch_of(tokens=[1], outputs=2),
        lambda native: native.decode(batch_of(tokens=[1] * 3, outputs=3)),
        lambda native: native.share(0, 1, 1),
        lambda native: native.truncate(7, 0),
        lambda native: (native.decode(batch_of(outputs=0)), native.logits()),
        lambda native: native.draw(chain(), 3),
    ],
    ids=[
        "more tokens than a batch holds",
        "a sequence there is not",
        "a negative token",
        "a token out of the vocabulary",
        "no tokens",
        "more tokens than the arrays hold",
        "logits of more tokens than there are",
        "logits of more tokens than the buffer holds",
        "part of a sequence shared between partitions",
        "a sequence there is not cut back",
        "logits that were not asked for",
        "a draw from an output there is not",
    ],
)
def test_what_would_abort_is_refused(native, wrong):
    with pytest.raises(NativeError):
        wrong(native)


def chain():
    return Chain([("temp", (1.0,))], 1)
