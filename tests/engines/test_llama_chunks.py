"""A text tokenizes in parts as it does whole, wherever it may be cut: on a real vocabulary, ours, and one of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")
from rigs import SMOLLM2

from citadel.engine import EngineSpec
from engines.llama_chunks import CHUNK_BYTES, Special, chunks, cuts_of
from engines.llama_text import Tokenizer, specials
from tests.models.gguf_file import finish

TINY = Path(__file__).parent.parent / "models" / "tiny.gguf"
WORDS = [
    "a",
    "the ",
    " the",
    "hello",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "äöü",
    "日本",
    "🙂",
    "1234",
    "'s",
    "<",
    "|",
    ">",
    "<|",
    "|>",
]


def pieces_vocabulary(path: Path) -> Path:
    """A file of a SentencePiece vocabulary alone: a space goes in front of a text and behind every control token."""
    import gguf  # noqa: PLC0415 - the tests skip where it is not installed

    kind = gguf.TokenType
    tokens = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL), ("<|user|>", kind.CONTROL)]
    tokens += [("<s><s>", kind.CONTROL), ("[IMG]", kind.USER_DEFINED)]
    tokens += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    tokens += [
        (text, kind.NORMAL) for text in ("▁", "a", "t", "h", "e", "l", "o", "▁a", "th", "the", "▁the", "he", "ll")
    ]
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(64)
    writer.add_layer_norm_rms_eps(1e-5)
    finish(writer)
    return path


@pytest.fixture(scope="module", params=["smollm2", "tiny", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "pieces":
        pytest.importorskip("gguf")
        path = pieces_vocabulary(tmp_path_factory.mktemp("pieces") / "pieces.gguf")
    else:
        path = SMOLLM2 if request.param == "smollm2" else TINY
        if not path.exists():
            pytest.skip(f"there is no {path.name}")
    return Tokenizer(EngineSpec("m", path, None, 1, None, None, path.parent))


def whole(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return tokenizer._vocabulary.tokenize(data)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_tokens_of_the_parts_are_those_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    cuts = tokenizer._cuts
    assert cuts is not None
    marks = [special.text.decode() for special in specials(tokenizer._vocabulary)]
    halves = [mark[: len(mark) // 2] for mark in marks] + [mark[len(mark) // 2 :] for mark in marks]
    piece = st.sampled_from([*WORDS, *marks, *marks, *halves]) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(piece, max_size=60))).encode("utf-8", "replace")
    parts = list(chunks(text, cuts, data.draw(st.integers(0, 40))))
    assert b"".join(parts) == text
    assert [token for part in parts for token in whole(tokenizer, part)] == whole(tokenizer, text)


def test_a_long_conversation_is_tokenized_in_parts(tokenizer: Tokenizer) -> None:
    cuts = tokenizer._cuts
    assert cuts is not None
    mark = next(cuts.finditer(b"<|im_start|><|user|>")).group().decode()
    text = f"{mark}the hello\n" * (3 * CHUNK_BYTES // len(mark))
    assert len(list(chunks(text.encode(), cuts))) > 3
    assert tokenizer.encode(text) == whole(tokenizer, text.encode())


def test_a_long_text_without_marks_stays_whole(tokenizer: Tokenizer) -> None:
    cuts = tokenizer._cuts
    assert cuts is not None
    text = b"hello the " * CHUNK_BYTES
    assert list(chunks(text, cuts)) == [text]


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], ""),
        ([Special(b"<b>", cuts=True)], ""),
        ([Special(b"x<end>", cuts=False)], "it stands in another"),
        ([Special(b"nd", cuts=False)], "another stands in it"),
        ([Special(b"d><", cuts=False)], "its end begins another"),
        ([Special(b"x<", cuts=False)], "its beginning ends another"),
        ([Special(b"<end>", cuts=True)], "two tokens have the same text"),
    ],
)
def test_a_text_is_not_cut_behind_what_may_lie_across_another_token(others: Sequence[Special], why: str) -> None:
    cuts = cuts_of([Special(b"<end>", cuts=True), *others])
    assert (cuts is None or cuts.search(b"a<end>b") is None) == bool(why)


@pytest.mark.parametrize(
    "special", [Special(b"<end>", cuts=False), Special(b"abab", cuts=True), Special(b"\n<end>", cuts=True)]
)
def test_some_tokens_never_cut(special: Special) -> None:
    """One that is no control token or strips its neighbours, one that overlaps itself, one of white space."""
    assert cuts_of([special]) is None
