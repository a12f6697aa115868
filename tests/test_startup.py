"""A server starts on its own code: what a model needs, or a page, is imported when it is asked for."""

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

async def main():
    logs.configure()
    async with app.services(config.load(Path(sys.argv[1]))) as services:
        app.build(services)
        await services.registry.considered()

asyncio.run(main())
print(*[name for name in {LATER!r} if name in sys.modules])
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


def test_a_server_that_starts_has_imported_no_engine_and_no_renderer(tmp_path: Path) -> None:
    settings = tmp_path / "models.toml"
    settings.write_text(MODELS.format(folder=tmp_path, root=ROOT), encoding="utf-8")
    command = [sys.executable, "-c", STARTS, str(settings)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
