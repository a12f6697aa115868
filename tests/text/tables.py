"""All cases of all formats."""

from __future__ import annotations

from tests.text import cases_json, cases_other, cases_tagged
from tests.text.harness import Case
from tests.text.shared_cases import shared_cases
from tests.text.styles import STYLES

OWN: dict[str, tuple[Case, ...]] = {
    "qwen3_xml": cases_tagged.QWEN,
    "deepseek_v4": cases_tagged.DSML,
    "glm47": cases_tagged.GLM,
    "minimax_m2": cases_tagged.MINIMAX,
    "hermes": cases_json.HERMES,
    "llama3_json": cases_json.LLAMA,
    "mistral": cases_json.MISTRAL,
    "granite": cases_json.LISTS,
    "phi4_mini": cases_json.PHI,
    "kimi_k2": cases_json.KIMI,
    "deepseek_v3": cases_json.DEEPSEEK,
    "pythonic": cases_other.PYTHONIC,
    "gemma4": cases_other.GEMMA,
    "functiongemma": cases_other.FUNCTIONGEMMA,
    "harmony": cases_other.HARMONY,
    "plain": cases_other.PLAIN,
}

CASES: dict[str, tuple[Case, ...]] = {
    fmt: (*OWN.get(fmt, ()), *(shared_cases(fmt) if fmt in STYLES else ())) for fmt in {**OWN, **STYLES}
}
