"""A GGUF header is read as it is, and one that lies is refused with a clear word: nothing crashes, nothing is slow."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_headers import Told, header, text
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import gguf_parts
from engines.gguf_header import BLOCKS, NotGguf, read_header
from engines.gguf_parts import MissingPart, Table, known_table, read_table

LLAMA = {"general.architecture": "llama", "llama.block_count": 2}
TWO = (Told("a", (256, 3), "q4_K"), Told("b", (5, 7)))


def written(folder: Path, content: bytes, name: str = "m.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_the_table_says_where_each_tensor_is(tmp_path: Path):
    head = header(LLAMA, TWO)
    table = read_table(written(tmp_path, head)).tensors
    assert [(each.name, each.type, each.shape) for each in table] == [("a", "q4_K", (256, 3)), ("b", "f32", (5, 7))]
    assert [(each.offset, each.size) for each in table] == [(len(head), 432), (len(head) + 448, 140)]


def test_a_header_alone_can_be_read_and_is_not_taken_for_a_model(tmp_path: Path):
    head = header(LLAMA, TWO)
    path = written(tmp_path, head)
    with pytest.raises(NotGguf, match=r"m\.gguf is cut off"):
        read_table(path).check_complete()
    path.write_bytes(head + bytes(448 + 140))
    read_table(path).check_complete()


def test_a_file_that_has_not_changed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, header(LLAMA, TWO))
    changed = path.stat().st_ctime

    def at(seconds: float) -> Table:
        monkeypatch.setattr(gguf_parts, "time", SimpleNamespace(time=lambda: changed + seconds))
        return known_table(path)

    assert at(0.5) is not at(0.5)
    first = at(60)
    assert at(61) is first
    written(tmp_path, header(LLAMA, TWO[:1]))
    assert [each.name for each in known_table(path).tensors] == ["a"]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        known_table(path)


def test_blocks_are_llama_cpps_own():
    llama_cpp = pytest.importorskip("llama_cpp").llama_cpp
    base = ctypes.CDLL(str(Path(llama_cpp._lib._name).with_name("libggml-base.so")))
    base.ggml_type_name.restype, base.ggml_blck_size.restype = ctypes.c_char_p, ctypes.c_int64
    base.ggml_type_size.restype = ctypes.c_size_t
    for number, known in BLOCKS.items():
        theirs = base.ggml_type_name(number), base.ggml_blck_size(number), base.ggml_type_size(number)
        assert (known[0].encode(), known[1], known[2]) == theirs


GGUF = b"GGUF" + struct.pack("<I", 3)
LIES = {
    "a million tensors": (header(LLAMA, TWO, count=10**6), "names 1000000 tensors"),
    "more tensors than there are": (header(LLAMA, TWO, count=60_000), "cut off|dimensions|is called"),
    "2**63 values": (GGUF + struct.pack("<QQ", 0, 2**63), "names 0 tensors"),
    "a wrong offset": (header(LLAMA, [TWO[0], TWO[1]._replace(offset=64)]), "said to be at 64, and must be at 448"),
    "an offset past all": (header(LLAMA, [TWO[0]._replace(offset=2**63)]), "must be at 0"),
    "a size past counting": (header(LLAMA, [Told("a", (2**40, 2**40))]), "can't have the shape"),
    "no weights": (header(LLAMA, [Told("a", (0, 4))]), "can't have the shape"),
    "a torn block": (header(LLAMA, [Told("a", (100, 4), "q4_K")]), "can't have the shape"),
    "no such type": (header(LLAMA, [Told("a", (4,), 31)]), "unknown type 31"),
    "a removed type": (header(LLAMA, [Told("a", (4,), 4)]), "unknown type 4"),
    "no dimensions": (header(LLAMA, [Told("a", ())]), "0 dimensions"),
    "many dimensions": (header(LLAMA, [Told("a", (1,) * 9)]), "9 dimensions"),
    "a long name": (header(LLAMA, [Told("a" * 64, (4,))]), "is called"),
    "a name twice": (header(LLAMA, [Told("a", (8,)), Told("a", (8,))]), "'a' twice"),
    "a key twice": (GGUF + struct.pack("<QQ", 0, 2) + (text("k") + struct.pack("<II", 4, 1)) * 2, "'k' twice"),
    "a long text": (GGUF + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**63), "over 128 MB"),
    "a long array": (GGUF + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 10, 2**60), "over 128 MB"),
    "many empty texts": (GGUF + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60), "cut off"),
    "nested arrays": (GGUF + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) * 999, "of arrays"),
    "a type of value": (GGUF + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 77), "type of value 77"),
    "an odd alignment": (header({"general.alignment": 33}, TWO), "can't be aligned to 33"),
    "a megabyte of a key": (
        GGUF + struct.pack("<QQ", 0, 2) + (text("k" * 9**7) + struct.pack("<II", 4, 1)) * 2,
        "kk'",
    ),
    "no alignment": (header({"general.alignment": 0}, TWO), "can't be aligned to 0"),
    "an alignment in words": (header({"general.alignment": "32"}, TWO), "can't be aligned to '32'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str):
    content, reason = LIES[lie]
    with pytest.raises(NotGguf, match=reason) as caught:
        read_table(written(tmp_path, content))
    assert len(str(caught.value)) < 200


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    content = bytearray(header({**LLAMA, "llama.heads": [1, 2, 3], "words": ["a"] * 5}, TWO))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.sampled_from([0, 1, 9, 127, 255]))
    cut = data.draw(st.integers(0, len(content)))
    path = written(tmp_path_factory.getbasetemp(), bytes(content[: data.draw(st.sampled_from([cut, len(content)]))]))
    try:
        table = read_table(path)
        table.count("block_count")
        table.per_layer("heads", 3)
    except NotGguf:
        return
    assert sum(tensor.size for tensor in table.tensors) == table.size


# Split files.


def split(folder: Path, *changes: dict[str, object]) -> Path:
    """A model of two parts; `changes` are to each one's metadata."""
    for number, tensor in enumerate(TWO):
        told = {"split.count": 2, "split.no": number, "split.tensors.count": 2} | (changes[number] if changes else {})
        written(folder, header({**LLAMA, **told}, [tensor]), f"m-0000{number + 1}-of-00002.gguf")
    return folder / "m-00001-of-00002.gguf"


def test_the_parts_of_a_split_model_are_one_table(tmp_path: Path):
    table = read_table(split(tmp_path))
    assert [tensor.name for tensor in table.tensors] == ["a", "b"]
    assert (table.count("block_count"), table.size) == (2, 432 + 140)
    assert [part.path.name for part in table.parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_a_missing_part_is_named(tmp_path: Path):
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(MissingPart, match=r"m-00002-of-00002\.gguf is missing"):
        read_table(first)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"split.no": 0}, "says that it is part 0 of 2"),
        ({"split.count": 3}, {}, "says that it is part 0 of 3"),
        ({}, {"split.count": "two"}, "part 1 of 'two'"),
        ({"split.tensors.count": 9}, {}, "have 9 tensors, and they have 2"),
    ],
    ids=["number", "count", "words", "tensors"],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, first: object, second: object, reason: str):
    with pytest.raises(NotGguf, match=reason):
        read_table(split(tmp_path, first, second))  # type: ignore[arg-type]


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path):
    first = split(tmp_path)
    told = {**LLAMA, "split.count": 2, "split.no": 1}
    written(tmp_path, header(told, [TWO[0]]), "m-00002-of-00002.gguf")
    with pytest.raises(NotGguf, match="'a', which another part has too"):
        read_table(first)


def test_one_part_of_many_is_no_model(tmp_path: Path):
    with pytest.raises(NotGguf, match="part 1 of 3"):
        read_table(written(tmp_path, header({**LLAMA, "split.count": 3, "split.no": 1}, TWO)))


@pytest.mark.parametrize("count", ["text", 3.5, True, -1])
def test_a_count_that_is_none_is_refused(tmp_path: Path, count: object):
    with pytest.raises(NotGguf, match="block_count is"):
        read_table(written(tmp_path, header({**LLAMA, "llama.block_count": count}))).count("block_count")


def test_reading_a_header_of_published_size_keeps_no_vocabulary(tmp_path: Path):
    words = b"".join(text(f"token{number}") for number in range(5000))
    content = GGUF + struct.pack("<QQ", 0, 1) + text("tokens") + struct.pack("<IIQ", 9, 8, 5000) + words
    assert read_header(written(tmp_path, content)).metadata == {"tokens": None}
