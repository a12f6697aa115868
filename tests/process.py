"""`python -m citadel` as its owner starts it: a process of its own, on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Announcement:
    """`key` is there at the first start on a data directory only."""

    url: str
    key: str | None


class Process:
    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "citadel", "--port", "0", "--data-dir", str(folder / "data"), *arguments]
        self.log = folder / "server.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.lines: list[str] = []

    def announcement(self) -> Announcement:
        """Waits for what is printed once the server listens."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.strip().startswith("-d"):
                break
        else:
            raise AssertionError(self.log.read_text(encoding="utf-8"))
        key = next((line for line in self.lines if line.startswith("hlk_")), None)
        return Announcement(self.lines[0].rpartition(" ")[2], key)

    def wait(self) -> int:
        self.process.communicate()
        return self.process.returncode

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.wait()
