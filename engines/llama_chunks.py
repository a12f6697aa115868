"""Long texts in parts that tokenize as the whole does.

llama.cpp looks for every special token in all that is left of the text, from behind each one that it found before: the
time grows with the square of a conversation's turns. A control token ends what its neighbours can become, so a text
may be cut behind one, and the tokens of the parts are those of the whole. It may not where the token takes white
space of its neighbours with it, or where another token's text could lie across the cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK_BYTES: Final = 8_192


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is looked for in texts. `cuts`: it is a control token that leaves its neighbours as they are."""

    text: bytes
    cuts: bool


def cuts_of(specials: Sequence[Special]) -> re.Pattern[bytes] | None:
    """What finds the tokens behind which a text may be cut; None where there are none."""
    texts = [special.text for special in specials]
    everything = b"\0".join(texts)
    beginnings = {text[:size] for text in texts for size in range(1, len(text) + 1)}
    ends = {text[-size:] for text in texts for size in range(1, len(text) + 1)}

    def stands_alone(text: bytes) -> bool:
        """No token's text has a part in common with it, at either end or inside."""
        inner = range(1, len(text))
        return (
            text == text.strip()
            and everything.count(text) == 1
            and not any(text[size:] in beginnings or text[:size] in ends for size in inner)
            and not any(other in text for other in texts if other != text)
        )

    found = [special.text for special in specials if special.cuts and stands_alone(special.text)]
    return re.compile(b"|".join(map(re.escape, found))) if found else None


def chunks(data: bytes, cuts: re.Pattern[bytes], size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """`data` in parts of about `size` bytes, more where there is nothing to cut at."""
    start = 0
    while len(data) - start > size and (cut := cuts.search(data, start + size)) is not None:
        yield data[start : cut.end()]
        start = cut.end()
    if start < len(data):
        yield data[start:]
