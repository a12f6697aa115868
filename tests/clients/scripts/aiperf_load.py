"""aiperf to the end: twenty streamed chats of made-up text, four at a time, counted by a local tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from facts import KEY, MODEL, ROOT

tokenizer = os.environ["CITADEL_TOKENIZER"]
command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL, "--url", ROOT, "--api-key", KEY]
load = (
    "--request-count",
    "20",
    "--concurrency",
    "4",
    "--isl",
    "32",
    "--osl",
    "16",
    "--extra-inputs",
    "ignore_eos:true",
)
done = subprocess.run(
    [*command, "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer, *load, "--ui", "none"],
    env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},  # with which it takes no path
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
(results,) = Path("artifacts").rglob("profile_export_aiperf.json")
found = json.loads(results.read_text())
assert found["request_count"]["avg"] == 20, found["request_count"]
assert found["time_to_first_token"]["avg"] > 0
assert not found.get("error_summary"), found["error_summary"]
