"""Whether the time of a refusal tells how much of a wrong key is right.

Wrong keys are made of a right one: with none, some, or all but the last character of its secret. They are asked with
in turns, shuffled anew each round, so that whatever else the machine does falls on all of them alike. Twice:

- `check`: the check alone, `citadel.accounts.auth.verify`, in nanoseconds;
- `HTTP`: `GET /v1/models` on a server of its own over one connection, in microseconds.

Twenty right keys are used one after the other. In a round each kind is asked with once; a key's difference is the
median over its rounds of one refusal with all but the last character right, less one with none right. What is told is
the median over the keys, and three standard errors of it, within which it is noise. `same` is the same of two wrong
keys that are equal. The check is measured once more with a comparison planted in it that stops at the first wrong
character, to show that this measure would find one.

    python -m benchmarks.bench_key_timing [--rounds 1000] [--http-rounds 150] [--seed 0] [--json]

Rounds are per key. Exits with 1 when the secret's share of the time is over the noise, or the planted leak is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from operator import sub
from pathlib import Path
from unittest import mock

import aiohttp

from citadel.accounts import auth
from citadel.accounts.auth import KeyRow
from citadel.errors import InvalidApiKey
from tests.models.served import models_toml
from tests.process import Process

KEYS = 20
RIGHT_CHARACTERS = {"none": 0, "the first": 1, "half": 21, "all but the last": 42, "all but the last, again": 42}
LEAST, MOST, AGAIN = "none", "all but the last", "all but the last, again"
Times = dict[str, list[float]]
"""By kind of wrong key, of one right key."""


def wrong_secrets(right: str) -> dict[str, str]:
    """Each differs from `right` in every character behind its first ones."""
    other = "".join("a" if character != "a" else "b" for character in right)
    return {kind: right[:length] + other[length:] for kind, length in RIGHT_CHARACTERS.items()}


def time_check(rounds: int, dice: random.Random) -> Times:
    """Nanoseconds of each refusal."""
    key = auth.new_key()
    row = KeyRow(key.id, "member", frozenset({"llm"}), key.secret_sha256, datetime.now(UTC))
    now, wrong = datetime.now(UTC), wrong_secrets(key.text.rpartition("_")[2])
    times: Times = {kind: [] for kind in wrong}
    for _ in range(rounds):
        for kind in dice.sample(list(wrong), len(wrong)):
            secret = wrong[kind]
            start = time.perf_counter_ns()
            with suppress(InvalidApiKey):
                auth.verify(row, secret, now)
            took = time.perf_counter_ns() - start  # by itself: a look-up takes longer for some kinds than for others
            times[kind].append(took)
    return times


def time_planted(rounds: int, dice: random.Random) -> Times:
    """The same with a comparison that stops at the first difference, of secrets that are kept as they are."""

    def leaky(one: str, other: str) -> bool:
        return all(a == b for a, b in zip(one, other, strict=True))

    with (
        mock.patch.object(auth, "_digest", lambda secret: secret),
        mock.patch.object(hmac, "compare_digest", leaky),
    ):
        return time_check(rounds, dice)


async def time_http(url: str, owner: str, rounds: int, dice: random.Random) -> list[Times]:
    """Microseconds of each refusal."""
    async with aiohttp.ClientSession(url) as session:
        return [await time_http_key(session, owner, rounds, dice) for _ in range(KEYS)]


async def time_http_key(session: aiohttp.ClientSession, owner: str, rounds: int, dice: random.Random) -> Times:
    made, admin = {"member": "somebody", "scopes": ["llm"]}, {"Authorization": f"Bearer {owner}"}
    async with session.post("/admin/keys", json=made, headers=admin) as response:
        start_of_key, _, secret = (await response.json())["key"].rpartition("_")
    wrong = wrong_secrets(secret)
    times: Times = {kind: [] for kind in wrong}
    for _ in range(rounds):
        for kind in dice.sample(list(wrong), len(wrong)):
            headers = {"Authorization": f"Bearer {start_of_key}_{wrong[kind]}"}
            start = time.perf_counter_ns()
            async with session.get("/v1/models", headers=headers) as response:
                await response.read()
            took = time.perf_counter_ns() - start
            times[kind].append(took / 1000)
            assert response.status == 401
    return times


def summary(keys: list[Times]) -> dict[str, float]:
    """The median refusal by kind, over all keys; then the difference that the secret makes, and what is noise."""
    found = {kind: statistics.median(time_ for times in keys for time_ in times[kind]) for kind in RIGHT_CHARACTERS}
    for name, (kind, other) in {"difference": (MOST, LEAST), "same": (AGAIN, MOST)}.items():
        each = [statistics.median(map(sub, times[kind], times[other])) for times in keys]
        found[name] = statistics.median(each)
        # Of a median, by the median distance from it, so that a key asked at a bad moment of the machine counts little.
        deviation = 1.4826 * statistics.median(abs(one - found[name]) for one in each)
        found[f"noise of {name}"] = 3 * 1.2533 * deviation / len(each) ** 0.5
    return {name: round(value, 2) for name, value in found.items()}


def over_http(rounds: int, dice: random.Random) -> list[Times]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "script.jsonl"
        script.write_text('{"pieces": ["ok"]}\n', encoding="utf-8")
        models = models_toml({"m": {"engine": "replay", "source": str(script)}})
        (folder / "models.toml").write_text(models, encoding="utf-8")
        server = Process(folder)
        said = server.announcement()
        assert said.key is not None
        times = asyncio.run(time_http(said.url, said.key, rounds, dice))
        server.stop()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--http-rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    found = {
        "check, ns": summary([time_check(options.rounds, dice) for _ in range(KEYS)]),
        "planted, ns": summary([time_planted(options.rounds, dice) for _ in range(KEYS)]),
        "HTTP, us": summary(over_http(options.http_rounds, dice)),
    }
    told = {where: abs(each["difference"]) > each["noise of difference"] for where, each in found.items()}
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{k:<12} {v}" for k, v in found.items()))
    sys.exit(0 if told == {"check, ns": False, "planted, ns": True, "HTTP, us": False} else 1)


if __name__ == "__main__":
    main()
