"""One loaded engine per module and rig, and what the tests need to give it work."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rigs import RIGS, Jobs, Rig, WatchedLoad, watched_load

from citadel.engine import Engine, EngineSpec, Tokenizer


@pytest.fixture(scope="module", params=[pytest.param(rig, id=rig.name, marks=rig.marks) for rig in RIGS])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Every engine; a module for one engine alone has a fixture of its own."""
    assert request.param.adapter, "imported here, where it holds up no event loop"
    return request.param


@pytest.fixture(scope="module")
def spec(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    return rig.spec(tmp_path_factory.mktemp(rig.name))


@pytest.fixture(scope="module")
def tokenizer(rig: Rig, spec: EngineSpec) -> Tokenizer:
    return rig.adapter.open_tokenizer(spec)


@pytest.fixture(scope="module")
def jobs(rig: Rig, tokenizer: Tokenizer) -> Jobs:
    return Jobs(rig, tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(rig: Rig, spec: EngineSpec) -> AsyncIterator[WatchedLoad]:
    """One load for all tests that leave the engine alive."""
    found = await watched_load(rig, spec)
    try:
        yield found
    finally:
        await found.engine.close()


@pytest.fixture(scope="module")
def engine(load: WatchedLoad) -> Engine:
    return load.engine
