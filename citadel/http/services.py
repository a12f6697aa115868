"""What handlers need, put on the application under typed keys by the composition root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiohttp import web

from citadel.accounts.auth import Account
from citadel.accounts.journal import AsyncStore
from citadel.accounts.quota import Ledger
from citadel.config import Config
from citadel.http.body import BodyReader
from citadel.http.gate import Gate
from citadel.http.outbox import Outbox
from citadel.metrics import Metrics
from citadel.pipeline import Pipeline
from citadel.runtime.registry import Registry


@dataclass(frozen=True, slots=True)
class Services:
    """`started_at` in Unix seconds."""

    store: AsyncStore
    registry: Registry
    ledger: Ledger
    pipeline: Pipeline
    metrics: Metrics
    gate: Gate
    bodies: BodyReader
    outbox: Outbox
    started_at: int

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.registry.config


SERVICES: Final = web.AppKey("services", Services)
REQUEST_ID: Final = web.RequestKey("request_id", str)
ACCOUNT: Final = web.RequestKey("account", Account)
