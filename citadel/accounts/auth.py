"""Keys: how one is made, what is kept of it, and who comes with it.

A key is `hlk_<id>_<secret>`: the id finds its row, the secret is 43 random letters and digits (256 bits). Only the
secret's SHA-256 is kept: a slow hash would protect nothing that random, and would cost every call.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from citadel.errors import InsufficientScope, InvalidApiKey, MissingApiKey

Scope = Literal["llm", "gpu", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

_ALPHABET: Final = string.ascii_letters + string.digits
_KEY: Final = re.compile(r"hlk_([A-Za-z0-9]{8})_([A-Za-z0-9]{43})")
_NOBODY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """A key's own limits; None is what `[limits]` of models.toml says. `models`: the only ones it may call."""

    calls_per_minute: int | None = None
    calls_per_day: int | None = None
    daily_calls: int | None = None
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class MemberLimits:
    """A member's own limits; None is what `[limits]` says. `max_parallel` is per model."""

    daily_tokens: int | None = None
    open_per_member: int | None = None
    max_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What the store has of a key and its member; times are UTC. `rotated`: it has a successor."""

    id: str
    member: str
    scopes: frozenset[Scope]
    secret_sha256: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    rotated: bool = False
    limits: KeyLimits = KeyLimits()
    member_limits: MemberLimits = MemberLimits()


@dataclass(frozen=True, slots=True)
class Account:
    """Who calls: a member, by one of the member's keys."""

    member: str
    key_id: str
    scopes: frozenset[Scope]
    limits: KeyLimits = KeyLimits()
    member_limits: MemberLimits = MemberLimits()

    def may_use(self, model: str) -> bool:
        return self.limits.models is None or model in self.limits.models


@dataclass(frozen=True, slots=True)
class NewKey:
    """`text` is the only time that the secret is seen."""

    id: str
    text: str
    secret_sha256: str


def new_key() -> NewKey:
    id_ = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(43))
    return NewKey(id_, f"hlk_{id_}_{secret}", _digest(secret))


def parse_authorization(headers: Mapping[str, str], *, x_api_key: bool = False) -> tuple[str, str]:
    """The id and the secret of the key in `Authorization: Bearer KEY`. Raises MissingApiKey, InvalidApiKey.

    With `x_api_key`, a key in the header of that name counts as well, and is the one that is taken.
    """
    value = headers.get("Authorization")
    if x_api_key and (alone := headers.get("X-Api-Key")) is not None:
        value = f"Bearer {alone}"
    if value is None:
        raise MissingApiKey
    scheme, _, token = value.strip().partition(" ")
    match = _KEY.fullmatch(token.strip())
    if scheme.lower() != "bearer" or match is None:
        raise InvalidApiKey
    return match[1], match[2]


def verify(row: KeyRow | None, secret: str, now: datetime) -> Account:
    """The account of a key that is known, right and alive. Takes the same time however much of the secret is right."""
    right = hmac.compare_digest(_digest(secret), row.secret_sha256 if row else _NOBODY)
    if row is None or not right or row.revoked_at is not None:
        raise InvalidApiKey
    if row.expires_at is not None and row.expires_at <= now:
        raise InvalidApiKey
    return Account(row.member, row.id, row.scopes, row.limits, row.member_limits)


def require(account: Account, scope: Scope) -> None:
    if scope not in account.scopes:
        raise InsufficientScope(scope)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("ascii")).hexdigest()
