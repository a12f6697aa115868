"""The command `llm`, with the server as a model of its configuration: a prompt, a conversation, tools, a wrong key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from facts import KEY, MODEL, URL, WRONG_KEY

home = Path("llm").absolute()
home.mkdir()
entry = {"model_id": "citadel", "model_name": MODEL, "api_base": URL, "api_key_name": "citadel"}
entry |= {"supports_tools": True, "supports_schema": True}
(home / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # which is YAML, too
TOOLS = """
def get_weather(city: str) -> str:
    "The weather of a city"
    return "18 degrees"

def to_fahrenheit(celsius: float) -> str:
    "Degrees in another unit"
    return "64.4"
"""


def llm(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    (home / "keys.json").write_text(json.dumps({"citadel": key}))
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(
        command, env={**os.environ, "LLM_USER_PATH": str(home)}, capture_output=True, text=True, check=False
    )


def answer(*arguments: str) -> str:
    done = llm(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


assert answer("-m", "citadel", "hi") == "Hello, world."
assert answer("-m", "citadel", "--no-stream", "hi") == "Hello, world."
assert answer("-m", "citadel", "-c", "What is the capital of Peru?") == "It is Lima."
assert answer("-m", "citadel", "--functions", TOOLS, "weather in Paris").endswith(
    "It is 64.4 degrees Fahrenheit in Paris."
)
assert json.loads(answer("-m", "citadel", "--schema", "name, age int", "Who is Ada?")) == {"name": "Ada", "age": 36}
refused = llm("-m", "citadel", "hi", key=WRONG_KEY)
assert refused.returncode == 1
assert "unknown or revoked" in refused.stderr
