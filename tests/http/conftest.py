"""What the tests of the HTTP API share: everything that is logged."""

from __future__ import annotations

import io
import logging
from collections.abc import Generator

import pytest

from citadel import logs


@pytest.fixture
def said() -> Generator[io.StringIO]:
    """Everything that is logged, of any library, from the level debug on."""
    logs.configure(logging.DEBUG)
    root, out = logging.getLogger(), io.StringIO()
    (handler,) = [each for each in root.handlers if type(each) is logging.StreamHandler]
    handler.setStream(out)
    root.setLevel(logging.DEBUG)
    yield out
    logs.configure()
