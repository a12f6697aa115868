"""What the scripts share: where the server is, who they are, and an expected exception."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

ROOT = os.environ["CITADEL_URL"]
URL = f"{ROOT}/v1"
KEY = os.environ["CITADEL_API_KEY"]
MODEL = os.environ["CITADEL_MODEL"]
ASLEEP = "asleep"
"""A model that has to be loaded first; with `X-LLM-Wait: 0` a call is told to come again in a second."""
NO_WAIT = {"X-LLM-Wait": "0"}
WRONG_KEY = "hlk_00000000_wrong"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


E = TypeVar("E", bound=Exception)


def raises(kind: type[E], call: Callable[[], object]) -> E:
    """The exception of that kind that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")
