"""OpenAI's six `x-ratelimit-*` headers: requests from the key's tightest limit, tokens from the member's day."""

from __future__ import annotations

import math

from citadel.accounts.auth import Account
from citadel.accounts.quota import Ledger


def headers(ledger: Ledger, account: Account) -> dict[str, str]:
    """Those of the limits that the account has."""
    out: dict[str, str] = {}
    for kind, state in (("requests", ledger.requests_left(account)), ("tokens", ledger.tokens_left(account))):
        if state is not None:
            out[f"x-ratelimit-limit-{kind}"] = str(state.limit)
            out[f"x-ratelimit-remaining-{kind}"] = str(state.remaining)
            out[f"x-ratelimit-reset-{kind}"] = duration(state.reset_s)
    return out


def duration(seconds: float) -> str:
    """`6m0s`, `1h2m3s`, `5s`: whole seconds, rounded up, in the units that OpenAI's clients read."""
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{left}s"
