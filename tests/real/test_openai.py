"""The OpenAI SDK, current and an older major version, against both real engines in one server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.process import ROOT
from tests.real.conftest import MODELS, RealServer, asking

SCRIPT = ROOT / "tests" / "clients" / "scripts" / "openai_session.py"
OLD_SDK = ROOT / ".venv" / "openai-2"
LIMIT = 33_554_432

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("major", ["3", "2"])
def test_a_users_session_with_the_sdk(real_server: RealServer, major: str, model: str) -> None:
    environment = dict(os.environ)
    if major == "2":
        environment["PYTHONPATH"] = str(OLD_SDK)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), real_server.url, real_server.key, model],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{major}.")


@pytest.mark.parametrize("model", MODELS)
async def test_a_prompt_that_is_too_long_is_told_to_the_field(session: aiohttp.ClientSession, model: str) -> None:
    async with session.post("/v1/chat/completions", json=asking("word " * 3000, model=model)) as response:
        error = (await response.json())["error"]
        assert response.status == 400
        assert set(error) == {"message", "type", "code", "param"}
        assert (error["type"], error["code"]) == ("context_length_exceeded", "context_length_exceeded")
        assert "maximum context length is 2048 tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{nope", 400, {"code": "invalid_json", "type": "invalid_request_error"}),
        (b"x" * (LIMIT + 1), 413, {"code": "too_large", "type": "invalid_request_error"}),
        (b'{"model": "nope"}', 404, {"code": "model_not_found", "available": list(MODELS), "model": "nope"}),
    ],
)
async def test_what_cannot_be_served_is_told(
    session: aiohttp.ClientSession, tmp_path: Path, body: bytes, status: int, error: dict[str, object]
) -> None:
    path = tmp_path / "body"
    path.write_bytes(body)
    with path.open("rb") as sent:
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/chat/completions", data=sent, headers=headers) as response:
            told = (await response.json())["error"]
            assert response.status == status
            assert error.items() <= told.items()
