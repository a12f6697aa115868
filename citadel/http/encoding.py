"""Content encodings of a body: undone piece by piece, so that what a few bytes grow to is bounded before it is made."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

ENCODINGS: Final = ("identity", "gzip", "deflate")
PIECE_BYTES: Final = 2**18
_GZIP: Final = 16 + zlib.MAX_WBITS


class BrokenEncoding(ValueError):
    """The bytes are not in their encoding, or end too early."""


class Decoder:
    def __init__(self, encoding: str) -> None:
        """`encoding` is one of ENCODINGS."""
        self._encoding = encoding
        self._inflate: Any = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` adds to the body, in pieces of at most PIECE_BYTES. Raises BrokenEncoding."""
        if self._encoding == "identity":
            yield data
            return
        while data:
            if self._inflate is None or (self._inflate.eof and self._encoding == "gzip"):
                self._inflate = zlib.decompressobj(self._window(data[0]))
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise BrokenEncoding(str(error)) from None
            yield piece
            data = self._inflate.unconsumed_tail
            if self._inflate.eof:
                data = self._inflate.unused_data  # of gzip, another member may follow
                if data and self._encoding != "gzip":
                    raise BrokenEncoding("there are bytes behind the end")

    def end(self) -> None:
        """The last byte is in. Raises BrokenEncoding where more had to come."""
        if self._encoding != "identity" and (self._inflate is None or not self._inflate.eof):
            raise BrokenEncoding("the body ends too early")

    def _window(self, first: int) -> int:
        """`deflate` is zlib's format; some send it without its header."""
        if self._encoding == "gzip":
            return _GZIP
        return zlib.MAX_WBITS if first & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS
