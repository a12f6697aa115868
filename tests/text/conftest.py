"""Text is understood without an event loop; and the long replays run only when asked for (`-m all`)."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all: replays under every pair of cuts; minutes, not seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "all" in config.getoption("markexpr", ""):
        return
    long = [item for item in items if item.get_closest_marker("all")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> None:
    """There is no loop to block here."""
