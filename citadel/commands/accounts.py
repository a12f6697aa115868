"""`citadel keys`, `members` and `usage`: they work on the database itself, whether the server runs or not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from citadel.accounts.auth import KeyLimits, NewKey
from citadel.accounts.store import MEMBER_LIMITS, CannotOpen, NotWritten, Store, day_number
from citadel.accounts.views import key_view, member_view
from citadel.commands.common import CommandFailed, data_dir_of, show


def create_key(options: argparse.Namespace) -> int:
    expires = None if options.expires_days is None else datetime.now(UTC) + timedelta(days=options.expires_days)
    models = None if options.model is None else frozenset(options.model)
    limits = KeyLimits(options.calls_per_minute, options.calls_per_day, options.daily_calls, models)
    with _store(options) as store:
        key = store.create_key(options.member, frozenset(options.scope), expires, limits)
    return _show_once(options, key, f"A key for {options.member} (scopes {', '.join(sorted(set(options.scope)))})")


def rotate_key(options: argparse.Namespace) -> int:
    with _store(options) as store:
        key = store.rotate_key(options.id, datetime.now(UTC) + timedelta(hours=options.overlap_hours))
    if key is None:
        return _no_live_key(options.id)
    return _show_once(options, key, f"The successor of {options.id}, which works {options.overlap_hours:g} hours more")


def revoke_key(options: argparse.Namespace) -> int:
    with _store(options) as store:
        revoked = store.revoke_key(options.id)
    if not revoked:
        return _no_live_key(options.id)
    print(json.dumps({"revoked": options.id}) if options.json else f"revoked {options.id}")
    return 0


def list_keys(options: argparse.Namespace) -> int:
    with _store(options) as store:
        show([key_view(row) for row in store.list_keys()], as_json=options.json)
    return 0


def list_members(options: argparse.Namespace) -> int:
    with _store(options) as store:
        show([member_view(name, limits) for name, limits in store.list_members().items()], as_json=options.json)
    return 0


def set_member(options: argparse.Namespace) -> int:
    """A limit of 0 on the command line takes the member's own limit away."""
    given = {name: getattr(options, name) for name in MEMBER_LIMITS}
    changes = {name: value or None for name, value in given.items() if value is not None}
    with _store(options) as store:
        known = store.set_member(options.member, changes)
        if known:
            show([member_view(options.member, store.list_members()[options.member])], as_json=options.json)
            return 0
    print(f"there is no member {options.member!r}; one is made with its first key", file=sys.stderr)
    return 1


def show_usage(options: argparse.Namespace) -> int:
    today = day_number(datetime.now(UTC))
    with _store(options) as store:
        rows = store.usage(today - options.days + 1, today)
    wanted = [row for row in rows if options.member in (None, row["member"])]
    show(wanted, as_json=options.json)
    return 0


@contextmanager
def _store(options: argparse.Namespace) -> Generator[Store]:
    try:
        store = Store(data_dir_of(options))
    except CannotOpen as error:
        raise CommandFailed(str(error)) from None
    try:
        yield store
    except NotWritten as error:
        raise CommandFailed(f"nothing is changed, the database could not be written: {error}") from None
    finally:
        store.close()


def _show_once(options: argparse.Namespace, key: NewKey, what: str) -> int:
    """The key's text is the last line, so that scripts can take it."""
    if options.json:
        print(json.dumps({"id": key.id, "key": key.text}))
        return 0
    print(f"{what}; it is not shown again:")
    print(key.text)
    return 0


def _no_live_key(id_: str) -> int:
    print(f"there is no live key {id_!r}", file=sys.stderr)
    return 1
