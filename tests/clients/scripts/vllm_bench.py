"""vLLM's own benchmark of servers, by its `main`: twenty chats and twenty completions of random tokens."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from facts import KEY, MODEL, ROOT
from vllm.benchmarks import serve

os.environ["OPENAI_API_KEY"] = KEY
PROMPTS = 20
for backend, path in (("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")):
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    where = ["--backend", backend, "--base-url", ROOT, "--endpoint", path, "--model", MODEL]
    what = ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "12", "--ignore-eos"]
    how = ["--num-prompts", str(PROMPTS), "--max-concurrency", "4", "--tokenizer", os.environ["CITADEL_TOKENIZER"]]
    kept = ["--save-result", "--result-dir", ".", "--result-filename", f"{backend}.json", "--disable-tqdm"]
    serve.main(parser.parse_args([*where, *what, *how, *kept]))
    found = json.loads(Path(f"{backend}.json").read_text())
    assert (found["completed"], found["failed"]) == (PROMPTS, 0), found
    assert found["total_output_tokens"] == PROMPTS * 12, found["total_output_tokens"]
