"""Keys and members as plain data for those who look after them: the command line and the `/admin` routes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from citadel.accounts.auth import KeyRow, MemberLimits


def key_view(row: KeyRow) -> dict[str, Any]:
    """A key without its secret; times as ISO text, in UTC."""
    return {
        "id": row.id,
        "member": row.member,
        "scopes": sorted(row.scopes),
        "created_at": _text(row.created_at),
        "expires_at": _text(row.expires_at),
        "revoked_at": _text(row.revoked_at),
        "calls_per_minute": row.limits.calls_per_minute,
        "calls_per_day": row.limits.calls_per_day,
        "daily_calls": row.limits.daily_calls,
        "models": None if row.limits.models is None else sorted(row.limits.models),
    }


def member_view(name: str, limits: MemberLimits) -> dict[str, Any]:
    return {
        "member": name,
        "daily_tokens": limits.daily_tokens,
        "open_per_member": limits.open_per_member,
        "max_parallel": limits.max_parallel,
    }


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
