"""lm-eval's local-chat-completions on a task of ten items, six of which the recording knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from facts import KEY, MODEL, URL

TASK = Path(__file__).parent / "lm_eval"
Path("task").mkdir()
for file in TASK.iterdir():
    text = file.read_text().replace("HERE", str(TASK))
    Path("task", file.name).write_text(text)
arguments = f"model={MODEL},base_url={URL}/chat/completions,num_concurrent=4,max_retries=1,tokenized_requests=False"
command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", arguments]
done = subprocess.run(
    [*command, "--tasks", "capitals", "--include_path", "task", "--apply_chat_template", "--output_path", "results"],
    env={**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1"},
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
(results,) = Path("results").rglob("results*.json")
found = json.loads(results.read_text())["results"]["capitals"]
assert found["exact_match,none"] == 0.6, found
