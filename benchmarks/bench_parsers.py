"""What it costs to understand an output, per piece of 4 characters: ours beside vLLM's own parsers.

    python benchmarks/bench_parsers.py [--json] [--formats hermes,glm47] [--no-vllm]

Each format reads words, one long string argument of 1,000 and of 16,000 pieces, and a list of numbers. Ours must stay
at 5 us a piece, and 16,000 pieces may cost 17 times what 1,000 do. vLLM reads 1,000 pieces, and 4,000 of the argument:
some of its parsers read all that came before again with each piece. Times are of the CPU, the best of five runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from citadel.messages import ToolSpec  # noqa: E402
from citadel.text.formats import FORMATS  # noqa: E402
from citadel.text.machine import Machine  # noqa: E402
from tests.text.styles import STYLES, Do, Say  # noqa: E402

PIECE = 4
LINE = "def area(width, height): return width * height  # some 2 words of 'code' to read, x <= y\n"
TOOL = ToolSpec(
    "write",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string"}, "numbers": {"type": "array", "items": {"type": "integer"}}},
    },
)


def pieces_of(raw: str) -> list[str]:
    return [raw[at : at + PIECE] for at in range(0, len(raw), PIECE)]


def words(fmt: str, number: int) -> list[str]:
    return pieces_of(STYLES[fmt].render([Say(_long(number))]))


def text_argument(fmt: str, number: int) -> list[str]:
    return pieces_of(STYLES[fmt].render([Do(("write", {"text": _long(number)}))]))


def numbers_argument(fmt: str, number: int) -> list[str]:
    return pieces_of(STYLES[fmt].render([Do(("write", {"numbers": list(range(100, 100 + number * PIECE // 5))}))]))


def _long(number: int) -> str:
    return (LINE * (number * PIECE // len(LINE) + 1))[: number * PIECE]


def ours(fmt: str, pieces: Sequence[str]) -> float:
    """Microseconds per piece."""
    machine = Machine(FORMATS[fmt], (TOOL,), in_reasoning=False, new_id=lambda: "chatcmpl-tool-0123456789abcdef")
    began = time.thread_time()
    for piece in pieces:
        machine.feed(piece)
    machine.finish(cut=False)
    return (time.thread_time() - began) / len(pieces) * 1e6


def best(measure: Callable[[], float], runs: int = 5) -> float:
    return round(min(measure() for _ in range(runs)), 2)


def measure_ours(fmt: str) -> dict[str, float]:
    short, long = text_argument(fmt, 1000), text_argument(fmt, 16_000)
    found = {
        "words": best(lambda: ours(fmt, words(fmt, 4000))),
        "text_1000": best(lambda: ours(fmt, short)),
        "text_16000": best(lambda: ours(fmt, long)),
        "numbers": best(lambda: ours(fmt, numbers_argument(fmt, 4000))),
    }
    growth = found["text_16000"] * len(long) / (found["text_1000"] * len(short))
    return {**found, "growth": round(growth, 1)}


def measure_vllm(fmt: str) -> dict[str, float | str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.text.peer import TOOL_PARSERS, Peer  # noqa: PLC0415 - takes seconds, and vllm may be missing
    logging.disable(logging.CRITICAL)
    if fmt not in TOOL_PARSERS:
        return {"text_1000": "reads token ids only"}
    peer = Peer(fmt, (TOOL,))

    def read(pieces: Sequence[str]) -> float:
        parser, before = peer.parser(), ""
        began = time.thread_time()
        for piece in pieces:
            now = before + piece
            parser.extract_tool_calls_streaming(before, now, piece, [], [], [], peer.request)
            before = now
        return (time.thread_time() - began) / len(pieces) * 1e6

    found: dict[str, float | str] = {}
    for name, pieces in (
        ("words", words(fmt, 1000)),
        ("text_1000", text_argument(fmt, 1000)),
        ("text_4000", text_argument(fmt, 4000)),
    ):
        try:
            found[name] = best(lambda pieces=pieces: read(pieces), runs=1)
        except Exception as error:  # noqa: BLE001 - a parser that fails on a well-formed output is a result
            found[name] = f"{type(error).__name__}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--formats", default=",".join(STYLES))
    parser.add_argument("--no-vllm", action="store_true")
    asked = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for fmt in asked.formats.split(","):
        results[fmt] = {"ours": measure_ours(fmt)}
        if not asked.no_vllm:
            results[fmt]["vllm"] = measure_vllm(fmt)
    if asked.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def show(results: dict[str, dict[str, Any]]) -> None:
    print(
        "us per piece of 4 characters   ours: words   text 1k  text 16k  growth  numbers"
        "   vllm: words   text 1k   text 4k"
    )
    for fmt, found in results.items():
        own, peer = found["ours"], found.get("vllm", {})
        print(
            f"{fmt:30} {own['words']:11.2f} {own['text_1000']:9.2f} {own['text_16000']:9.2f} {own['growth']:7.1f}"
            f" {own['numbers']:8.2f} {peer.get('words', '-')!s:>13} {peer.get('text_1000', '-')!s:>9}"
            f" {peer.get('text_4000', '-')!s:>9}"
        )
    worst = max(value for found in results.values() for name, value in found["ours"].items() if name != "growth")
    growth = max(found["ours"]["growth"] for found in results.values())
    print(f"ours, worst: {worst:.2f} us a piece (at most 5), 16,000 pieces cost {growth:.1f} times 1,000 (at most 17)")


if __name__ == "__main__":
    main()
