"""How soon `python -m citadel` answers `/healthz`, and what it holds in memory with no model loaded.

    python benchmarks/bench_startup.py [--rounds 9] [--json]

The models are one of each engine, not loaded. The time is from starting the interpreter to the first answer; memory is
the RSS of the process then, and CPU what it has used by then, which other work on the machine changes least. The first
round is not counted: it compiles, and reads what is on the disk.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
MODELS = """
[server]
port = 0
data_dir = "{folder}/data"

[models.recorded]
engine = "replay"
source = "{folder}/script.jsonl"

[models.small]
engine = "llama"
source = "{root}/tests/models/tiny.gguf"

[models.checkpoint]
engine = "hyperqwen"
source = "{root}/tests/models/tiny"
"""


def start(folder: Path) -> tuple[float, float, float]:
    """Seconds to the first answer, seconds of CPU, and RSS in 10^6 bytes."""
    (folder / "script.jsonl").write_text('{"pieces": ["ok"]}\n', encoding="utf-8")
    settings = folder / "models.toml"
    settings.write_text(MODELS.format(folder=folder, root=ROOT), encoding="utf-8")
    command = [sys.executable, "-m", "citadel", "--config", str(settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if " models on http://" in line)
        connection = http.client.HTTPConnection(line.rpartition("//")[2].strip(), timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        seconds = time.perf_counter() - began
        connection.close()
        process = psutil.Process(server.pid)
        memory, cpu = process.memory_info().rss / 1e6, process.cpu_times()
        server.terminate()
        server.communicate()
    return seconds, cpu.user + cpu.system, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: list[tuple[float, float, float]] = []
    for _ in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            found.append(start(Path(folder)))
    times, cpus, memories = zip(*found[1:], strict=True)
    figures: dict[str, Any] = {
        "seconds": [round(each, 3) for each in times],
        "seconds_median": round(statistics.median(times), 3),
        "cpu_seconds_median": round(statistics.median(cpus), 3),
        "memory_mb": round(statistics.median(memories), 1),
        "targets": {"seconds": 1.0, "memory_mb": 120},
    }
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        print("| | median | best | worst | target |\n|---|--:|--:|--:|--:|")
        print(f"| to `/healthz` | {statistics.median(times):.2f} s | {min(times):.2f} s | {max(times):.2f} s | 1.0 s |")
        print(f"| CPU until then | {statistics.median(cpus):.2f} s | {min(cpus):.2f} s | {max(cpus):.2f} s | |")
        print(f"| memory | {statistics.median(memories):.0f} MB | | {max(memories):.0f} MB | 120 MB |")


if __name__ == "__main__":
    main()
