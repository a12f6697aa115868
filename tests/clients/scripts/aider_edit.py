"""aider, without a terminal: one edit of one file as the model writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from facts import KEY, MODEL, URL

file = Path("greet.py")
file.write_text('def greet(name: str) -> str:\n    return f"Hi, {name}!"\n')
settings = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
command = [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", "--edit-format", "whole", *settings]
done = subprocess.run(
    [*command, "--message", "Please rewrite greet.py to be more formal.", str(file)],
    env={**os.environ, "OPENAI_API_BASE": URL, "OPENAI_API_KEY": KEY},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stderr
assert file.read_text() == 'def greet(name: str) -> str:\n    return f"Good day, {name}!"\n', done.stdout
