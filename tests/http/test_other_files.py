"""A model whose files are others while the server runs: what was looked up of the old ones is not used for the new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from citadel.runtime.installed import Prepared
from tests.conftest import make_config, serving, write_script

SENT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Seven:
    """A tokenizer to which every text is one token."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def encode(self, _text: str, *, add_special: bool = False) -> list[int]:
        return [8 if add_special else 7]


async def test_the_prompt_is_made_of_the_tokens_that_the_model_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_script(tmp_path / "script.jsonl", [{"pieces": ["ok"]}])
    async with serving(make_config(tmp_path, {"m": {"engine": "replay", "source": source}})) as server:

        async def count() -> int:
            async with server.session.post(server.url + "/tokenize", json=SENT) as response:
                assert response.status == 200, await response.text()
                return (await response.json())["count"]

        assert await count() > 1
        old = await server.services.registry.prepare("m")
        assert old is not None
        new = replace(old, tokenizer=Seven(old.tokenizer))

        async def prepare(_model: str) -> Prepared:
            return new

        monkeypatch.setattr(server.services.registry, "prepare", prepare)
        assert await count() == 1
