"""How results are shown and kept: a table, JSON and a plot, the last two in benchmarks/results/.

python -m benchmarks.report      the kept results against their targets, as the table of benchmarks/README.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

RESULTS: Final = Path(__file__).parent / "results"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    parser.add_argument("--full", action="store_true", help="the sizes of the published figures; the default is short")
    parser.add_argument("--no-save", action="store_true", help="leave benchmarks/results/ as it is")
    return parser


def context(**more: Any) -> dict[str, Any]:
    """Where, when and how: published with every result. `load` is of the minute before, at the end."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": plain(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {_cpu()}, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("GOMP_", "OMP_"))
        },
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 1),
        "steal_percent": round(psutil.cpu_times_percent(interval=0.1).steal, 1),
        **more,
    }


def plain(command: Sequence[str]) -> str:
    """A command as anyone would give it: of a path on this machine only the last part is kept."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in command)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor()


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(title=title, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        shown.add_row(*(_text(row.get(name, "")) for name in columns))
    Console(width=160).print(shown)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def save(name: str, result: Mapping[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def plot(name: str, title: str, panels: Mapping[str, Mapping[str, Mapping[Any, float]]], x_label: str) -> None:
    """`panels`: what is shown -> whose it is -> x -> y."""
    import matplotlib as mpl  # noqa: PLC0415 - the extra `bench`, and a second to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.6), squeeze=False)
    for axis, (label, lines) in zip(axes[0], panels.items(), strict=True):
        for whose, points in lines.items():
            axis.plot([str(x) for x in points], list(points.values()), marker="o", label=whose)
        axis.set(title=label, xlabel=x_label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", dpi=80)
    plt.close(figure)


def targets() -> str:
    """Markdown: what the kept results reached of what they were to reach."""
    lines = [
        "| work | figure | against | Citadel | theirs | reached | target | met |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        for aim in kept.get("aims", ()):
            cells = (path.stem, aim["figure"], aim["against"], aim.get("citadel", ""), aim.get("theirs", ""))
            met = "yes" if aim["met"] == "True" else "**no**"
            lines.append(f"| {' | '.join(map(_text, (*cells, aim['reached'], aim['target'], met)))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(targets())
