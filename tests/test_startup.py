"""A server starts on its own code: what a model needs, or a page, is imported when it is asked for, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LATER = (
    *("torch", "vllm", "transformers", "tokenizers", "llama_cpp", "huggingface_hub", "numpy"),
    *("jinja2", "markdown_it"),
)
STARTS = f"""
import asyncio, sys
from pathlib import Path
from citadel import app, cli, config, logs
from citadel.accounts.auth import Account
from citadel.messages import Message, SamplingRequest
from citadel.pipeline import Call, ChatRequest

def tell(what):
    print(what, *[name for name in {LATER!r} if name in sys.modules], file=sys.stderr)

async def heard(event):
    pass

async def main():
    logs.configure()
    settings = config.load(Path(sys.argv[1]))
    async with app.services(settings) as services:
        app.build(services)
        await services.registry.considered()
        tell("started:")
        app.import_early(settings)
        tell("listening:")
        sampling = SamplingRequest(max_tokens=1)
        request = ChatRequest("small", "small", (Message("user", "hello"),), sampling=sampling)
        call = Call("first", Account("ada", "key", frozenset()), request, 60.0, 100)
        await services.pipeline.run(call, heard)
        tell("answered:")

asyncio.run(main())
"""
MODELS = """
[server]
data_dir = "{folder}/data"
[models.recorded]
engine = "replay"
source = "no-such-file"
[models.small]
engine = "llama"
source = "{root}/tests/models/tiny.gguf"
[models.checkpoint]
engine = "hyperqwen"
source = "{root}/tests/models/tiny"
"""


def test_a_server_imports_no_engine_and_no_renderer_before_it_needs_them(tmp_path: Path) -> None:
    settings = tmp_path / "models.toml"
    settings.write_text(MODELS.format(folder=tmp_path, root=ROOT), encoding="utf-8")
    command = [sys.executable, "-c", STARTS, str(settings)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    told = {line.partition(":")[0]: line.partition(":")[2].split() for line in ran.stderr.splitlines() if ":" in line}
    assert told["started"] == []
    assert told["listening"] == told["answered"] == ["llama_cpp", "numpy", "jinja2"]
