"""llama.cpp's binding, imported here and nowhere else; and what llama.cpp writes, as records of `citadel.llama`.

Errors are kept to say why a load failed. llama.cpp has one log callback for the process and hands it text in fragments,
from whatever thread it runs in.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from engines import openmp

with openmp.environment(openmp.brief()):
    import llama_cpp

if TYPE_CHECKING:
    from collections.abc import Generator

lib: Any = llama_cpp.llama_cpp
"""llama.cpp's functions and structures; the binding's types for them are not what ctypes takes."""
VERSION: Final[str] = llama_cpp.__version__
"""The binding's."""
log = logging.getLogger("citadel.llama")

_LEVELS: Final = {0: logging.INFO, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels; 5 continues the line before."""
_CONTINUE: Final = 5


class _Line(threading.local):
    """The unfinished line of a thread, and where its errors are collected."""

    def __init__(self) -> None:
        self.text = ""
        self.level = logging.INFO
        self.errors: list[str] | None = None


_line = _Line()


def _receive(level: int, text: bytes, _data: object) -> None:
    if level != _CONTINUE:
        _line.level = _LEVELS.get(level, logging.INFO)
    if _line.level < logging.ERROR and not log.isEnabledFor(_line.level):
        return
    _line.text += text.decode("utf-8", "replace")
    if not _line.text.endswith("\n"):
        return
    message, _line.text = _line.text.strip(), ""
    if _line.level >= logging.ERROR and _line.errors is not None:
        _line.errors.append(message)
    if message.strip("."):
        log.log(_line.level, "%s", message)


_callback = lib.llama_log_callback(_receive)
"""llama.cpp keeps only the address; this reference keeps the code behind it alive."""


def install() -> None:
    """Takes the log over; the binding's own callback reads the levels wrongly."""
    lib.llama_log_set(_callback, None)


@contextmanager
def errors_kept() -> Generator[list[str]]:
    """The error lines that this thread's calls write meanwhile."""
    before, _line.errors = _line.errors, []
    try:
        yield _line.errors
    finally:
        _line.errors = before
