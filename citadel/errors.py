"""Every error that a caller can be told, and the one table that says how.

    CitadelError
    +-- InvalidJson, BadBody, BadHeader, TooLarge, UnsupportedMediaType, MethodNotAllowed, NotFound
    +-- Conflict, MethodNotImplemented
    +-- MissingApiKey, InvalidApiKey, InsufficientScope
    +-- BadRequest                      a field of the body, or what the model rejects
    |   +-- ContextLengthExceeded       (InputTooLong says it of a text to be embedded)
    +-- ModelNotFound
    +-- ParallelUnsupported, TooManyParallel
    +-- DailyLimit, DailyTokens, TooManyStreams
    +-- RateLimited
    |   +-- TooManyLeases
    +-- EngineRestarted, LlmUnavailable, EdgeError
    +-- ModelLoading, Queued, GpuBusy, InsufficientMemory
    +-- DeviceOffline, DeviceBusy
    +-- Internal

`TABLE` is looked up along the class's MRO, so a subclass without a row of its own answers as its parent does.
`openai_body`, `anthropic_body` and `citadel_body` are the formats, `headers` what goes beside any of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

_SECRET: Final = re.compile(r"(hlk_[A-Za-z0-9]{8}_)[A-Za-z0-9]+")

MAX_RETRY_AFTER_MS: Final = 55_000
"""OpenAI's SDKs ignore, or give up on, a wait of more than 60 s; below it they do as they are told."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of error is answered.

    `fields` names the extra fields of the body; `retry_s` is the Retry-After where the error carries none of
    its own; `stream_code` replaces `code` when the error is an event in a stream.
    """

    status: int
    code: str
    type: str
    fields: tuple[str, ...] = ()
    retry_s: int | None = None
    should_retry: bool = True
    stream_code: int | None = None


class CitadelError(Exception):
    """An error with a row in `TABLE`. `fields` holds the values of the row's extra fields."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    @property
    def row(self) -> Row:
        return next(TABLE[cls] for cls in type(self).__mro__ if cls in TABLE)

    @property
    def retry_after_s(self) -> int | None:
        return self.fields.get("retry_after_s", self.row.retry_s)


class InvalidJson(CitadelError):
    def __init__(self, reason: str) -> None:
        super().__init__("The body is not a JSON object", reason=reason)


class BadBody(CitadelError):
    def __init__(self, why: str = "The body could not be read") -> None:
        super().__init__(why)


class BadHeader(CitadelError):
    pass


class TooLarge(CitadelError):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is over {limit_bytes} bytes")


class UnsupportedMediaType(CitadelError):
    def __init__(self) -> None:
        super().__init__("Content-Type must be application/json")


class MethodNotAllowed(CitadelError):
    def __init__(self, method: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not allowed here")
        self.allowed = tuple(allowed)


class NotFound(CitadelError):
    def __init__(self) -> None:
        super().__init__("not found")


class Conflict(CitadelError):
    """What is asked for does not go with how things are, such as a successor for a key that has ended."""


class MethodNotImplemented(CitadelError):
    """A method that none of our routes has a meaning for, such as WebDAV's."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} is not implemented")


class MissingApiKey(CitadelError):
    def __init__(self) -> None:
        super().__init__("No Authorization header")


class InvalidApiKey(CitadelError):
    def __init__(self) -> None:
        super().__init__("The API key is unknown or revoked")


class InsufficientScope(CitadelError):
    def __init__(self, scope: str) -> None:
        super().__init__(f"The key does not carry the scope {scope}")


class BadRequest(CitadelError):
    """`param` is the field's path in the body, such as `messages[0].role`; None where no single field is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param)


class ContextLengthExceeded(BadRequest):
    """`limit` and `prompt_tokens` in tokens, the limit for prompt and output together."""

    def __init__(self, limit: int, prompt_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. Your messages came to {prompt_tokens} tokens, "
            "which leaves no room for an answer. Shorten the messages.",
            param="messages",
        )


class InputTooLong(ContextLengthExceeded):
    """The same of a text to be embedded; `param` names it."""

    def __init__(self, limit: int, tokens: int, param: str) -> None:
        BadRequest.__init__(
            self,
            f"This model's maximum context length is {limit} tokens. {param} came to {tokens} tokens. Shorten it.",
            param=param,
        )


class ModelNotFound(CitadelError):
    def __init__(self, model: str, available: Sequence[str]) -> None:
        super().__init__(f"The model {model!r} is not installed", model=model, available=list(available))


class ParallelUnsupported(CitadelError):
    def __init__(self, model: str) -> None:
        super().__init__(f"{model} runs one request at a time per account", max_parallel=1)


class TooManyParallel(CitadelError):
    def __init__(self, model: str, max_parallel: int) -> None:
        super().__init__(f"The account runs {max_parallel} requests on {model} already", max_parallel=max_parallel)


class DailyLimit(CitadelError):
    def __init__(self, limit: int, used: int, retry_after_s: int) -> None:
        super().__init__(f"The key's {limit} calls of this UTC day are used up", limit=limit, used=used)
        self._retry_after_s = retry_after_s

    @property
    def retry_after_s(self) -> int:
        return self._retry_after_s


class DailyTokens(DailyLimit):
    def __init__(self, limit: int, used: int, retry_after_s: int) -> None:
        super().__init__(limit, used, retry_after_s)
        self.message = f"The member's {limit} tokens of this UTC day are used up"


class RateLimited(CitadelError):
    def __init__(self, window: str, limit: int, retry_after_s: int) -> None:
        super().__init__(f"The key's {limit} calls per {window} are used up; retry in {retry_after_s} s")
        self._retry_after_s = retry_after_s

    @property
    def retry_after_s(self) -> int:
        return self._retry_after_s


class TooManyLeases(RateLimited):
    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__("lease", limit, retry_after_s)
        self.message = f"{limit} leases are open; release one, or retry in {retry_after_s} s"


class TooManyStreams(CitadelError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"The member has {limit} requests open", limit=limit)


class EngineRestarted(CitadelError):
    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} stopped and is restarted; the request ended", model=model, reason=reason)


class LlmUnavailable(CitadelError):
    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} cannot be started: {reason}", reason=reason)


class EdgeError(CitadelError):
    pass


class ModelLoading(CitadelError):
    def __init__(self, model: str, retry_after_s: int) -> None:
        super().__init__(
            f"Loading {model}; retry in {retry_after_s} s",
            model=model,
            state="starting",
            retry_after_s=retry_after_s,
        )


class Queued(CitadelError):
    """`position`: how many are ahead in the queue for the GPU."""

    def __init__(self, model: str, position: int, retry_after_s: int, reason: str) -> None:
        super().__init__(
            f"Waiting for the GPU ({position} ahead); retry in {retry_after_s} s",
            model=model,
            position=position,
            retry_after_s=retry_after_s,
            reason=reason,
        )


class GpuBusy(CitadelError):
    def __init__(self, reason: str) -> None:
        super().__init__("The GPU was not available in time", reason=reason)


class InsufficientMemory(CitadelError):
    """`needed` and `free` in bytes, of the kind of memory (`RAM`, `GPU memory`) that falls short."""

    def __init__(self, model: str, kind: str, needed: int, free: int, *, detail: str = "") -> None:
        numbers = f"needs {needed / 1e9:.2f} GB of {kind}, {free / 1e9:.2f} GB can be made free"
        reason = f"{numbers}; {detail}" if detail else numbers
        super().__init__(f"{model} cannot load now: {numbers}", model=model, reason=reason)


class DeviceOffline(CitadelError):
    def __init__(self) -> None:
        super().__init__("The language model service is offline")


class DeviceBusy(CitadelError):
    def __init__(self, open_calls: int) -> None:
        super().__init__(f"{open_calls} requests are open across all callers")


class Internal(CitadelError):
    def __init__(self) -> None:
        super().__init__("Server error")


_INVALID: Final = "invalid_request_error"
_LIMIT: Final = "rate_limit_exceeded"
_OFF: Final = "service_unavailable"

TABLE: Final[dict[type[CitadelError], Row]] = {
    InvalidJson: Row(400, "invalid_json", _INVALID, ("reason",)),
    BadBody: Row(400, "bad_body", _INVALID),
    BadHeader: Row(400, "bad_header", _INVALID),
    BadRequest: Row(400, "BadRequestError", "BadRequestError", ("param",)),
    ContextLengthExceeded: Row(400, "context_length_exceeded", "context_length_exceeded", ("param",)),
    ParallelUnsupported: Row(400, "parallel_unsupported", _INVALID, ("max_parallel",)),
    TooManyParallel: Row(400, "too_many_parallel", _INVALID, ("max_parallel",)),
    MissingApiKey: Row(401, "missing_api_key", _INVALID),
    InvalidApiKey: Row(401, "invalid_api_key", _INVALID),
    InsufficientScope: Row(403, "insufficient_scope", _INVALID),
    NotFound: Row(404, "not_found", _INVALID),
    ModelNotFound: Row(404, "model_not_found", _INVALID, ("model", "available")),
    MethodNotAllowed: Row(405, "method_not_allowed", _INVALID),
    Conflict: Row(409, "conflict", _INVALID),
    TooLarge: Row(413, "too_large", _INVALID),
    UnsupportedMediaType: Row(415, "unsupported_media_type", _INVALID),
    DailyLimit: Row(429, "daily_limit", _LIMIT, ("limit", "used"), should_retry=False),
    RateLimited: Row(429, "rate_limited", _LIMIT),
    DailyTokens: Row(429, "daily_tokens", _LIMIT, ("limit", "used"), should_retry=False),
    TooManyStreams: Row(429, "too_many_streams", _LIMIT, ("limit",), retry_s=5),
    Internal: Row(500, "internal", "internal"),
    MethodNotImplemented: Row(501, "not_implemented", _INVALID),
    EngineRestarted: Row(502, "engine_restarted", "engine_restarted", ("model", "reason"), stream_code=502),
    LlmUnavailable: Row(502, "llm-unavailable", "llm-unavailable", ("reason",)),
    EdgeError: Row(502, "edge_error", "edge_error"),
    ModelLoading: Row(503, "model_loading", "model_loading", ("model", "state", "retry_after_s")),
    Queued: Row(503, "queued", "queued", ("model", "position", "retry_after_s", "reason")),
    GpuBusy: Row(503, "gpu-busy", "gpu-busy", ("reason",), retry_s=60),
    InsufficientMemory: Row(503, "insufficient_memory", "insufficient_memory", ("model", "reason"), retry_s=60),
    DeviceOffline: Row(503, "device_offline", _OFF, retry_s=60),
    DeviceBusy: Row(503, "device_busy", _OFF, retry_s=5),
}

CITADEL_CODES: Final[dict[int, str]] = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    429: "rate_limited",
    500: "internal",
    501: "not_implemented",
    503: "unavailable",
}
"""The codes of the Citadel format, by status."""


def without_keys(value: Any) -> Any:
    """`value`, or the texts in a list, with the secrets of keys taken out: callers put keys where names belong."""
    if isinstance(value, list):
        return [without_keys(each) for each in cast("list[Any]", value)]
    return _SECRET.sub(r"\1...", value) if isinstance(value, str) else value


ANTHROPIC_TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}
"""The types of Anthropic's format, by status; of all others `invalid_request_error`.

The status stays the table's: 503 is what proxies and SDKs wait on as they do on Anthropic's own 529.
"""


def anthropic_body(error: CitadelError) -> dict[str, Any]:
    """The body on `/v1/messages`: `{"type": "error", "error": {"type", "message", ...}}`, with our code beside them."""
    row = error.row
    type_ = ANTHROPIC_TYPES.get(row.status, "invalid_request_error")
    body: dict[str, Any] = {"type": type_, "message": without_keys(error.message), "code": row.code}
    body.update({name: without_keys(error.fields.get(name)) for name in row.fields})
    return {"type": "error", "error": body}


def openai_body(error: CitadelError, *, in_stream: bool = False) -> dict[str, Any]:
    """The body on LLM routes: `{"error": {"message", "type", "code", ...}}`."""
    row = error.row
    code = row.stream_code if in_stream and row.stream_code is not None else row.code
    body: dict[str, Any] = {"message": without_keys(error.message), "type": row.type, "code": code}
    body.update({name: without_keys(error.fields.get(name)) for name in row.fields})
    return {"error": body}


def citadel_body(error: CitadelError) -> dict[str, Any]:
    """The body on all other routes: `{"ok": false, "error", "code", "message"}`; a code of its own is in `detail`."""
    row = error.row
    code = CITADEL_CODES.get(row.status, "unavailable" if row.status >= 502 else "bad_request")
    body: dict[str, Any] = {"ok": False, "error": code.replace("_", "-"), "code": code}
    body["message"] = without_keys(error.message)
    if row.code != code and row.status not in (401, 403):
        body["detail"] = {"code": row.code, **{name: without_keys(error.fields.get(name)) for name in row.fields}}
    return body


def headers(error: CitadelError) -> dict[str, str]:
    """Retry-After and its kin, Allow, WWW-Authenticate: what the status obliges us to send beside the body."""
    out: dict[str, str] = {}
    if (seconds := error.retry_after_s) is not None:
        out["Retry-After"] = str(seconds)
        if error.row.should_retry:
            out["retry-after-ms"] = str(min(seconds * 1000, MAX_RETRY_AFTER_MS))
    if not error.row.should_retry:
        out["x-should-retry"] = "false"
    if isinstance(error, MethodNotAllowed):
        out["Allow"] = ", ".join(error.allowed)
    if error.row.status == 401:
        out["WWW-Authenticate"] = "Bearer"
    return out
