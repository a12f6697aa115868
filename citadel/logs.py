"""Logs on standard error: an event's name and its fields, for people on a terminal, as JSON lines elsewhere.

Libraries that use the standard `logging` come out the same way, each line with the request's id where it has one.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog

from citadel.errors import without_keys


def configure(level: int = logging.INFO) -> None:
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    # Plain tracebacks, without the values of local variables: those would be somebody's prompt or key.
    if sys.stderr.isatty():
        last: list[Any] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last, _without_keys],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("citadel").setLevel(level)
    logging.getLogger("citadel.llama").setLevel(max(level, logging.WARNING))  # else a thousand lines per load
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def request_id() -> str | None:
    """Of the request that this runs for."""
    return structlog.contextvars.get_contextvars().get("request_id")


def on_behalf_of(id_: str | None) -> AbstractContextManager[None]:
    """Lines logged in this block, and by tasks begun in it, have the id of the request that wanted what is done."""
    return nullcontext() if id_ is None else structlog.contextvars.bound_contextvars(request_id=id_)


def _without_keys(_logger: Any, _method: str, line: Any) -> str:
    """A key that somebody put into a path or a name must not lie in a log."""
    return without_keys(line)
