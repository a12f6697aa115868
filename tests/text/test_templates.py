"""The format of a model is recognised from its chat template: about 70 real ones, and some of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from citadel.text.formats import FORMATS, recognise

FETCHED = Path(__file__).parents[2] / ".venv" / "chat-templates"
FETCH = "python tests/fixtures/fetch_templates.py"

REAL = {
    "Apertus-8B-Instruct": "plain",
    "Apriel-1.6-15b-Thinker-fixed": "hermes",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "qwen3_xml",
    "Cohere2MoE": "plain",
    "CohereForAI-c4ai-command-r-plus-tool_use": "plain",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "plain",
    "GLM-4.6": "glm47",
    "GLM-4.7-Flash": "glm47",
    "GigaChat3-10B-A1.8B": "plain",
    "GigaChat3.1-10B-A1.8B": "plain",
    "HuggingFaceTB-SmolLM3-3B": "plain",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "Kimi-K3": "plain",
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-8B-A1B": "pythonic",
    "LFM2.5-Instruct": "plain",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "hermes",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "plain",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_xml",
    "NVIDIA-Nemotron-Nano-v2": "hermes",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_xml",
    "Qwen3.5-4B": "qwen3_xml",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm47",
    "StepFun3.5-Flash": "qwen3_xml",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "fireworks-ai-llama-3-firefunction-v2": "phi4_mini",
    "google-gemma-2-2b-it": "plain",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm47",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "llama-cpp-rwkv-world": "plain",
    "meetkai-functionary-medium-v3.1": "plain",
    "meetkai-functionary-medium-v3.2": "plain",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "microsoft-Phi-3.5-mini-instruct": "plain",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi_k2",
    "muse-glimmer": "plain",
    "openai-gpt-oss-120b": "harmony",
    "openbmb-MiniCPM5-1B": "plain",
    "poolside-Laguna-S-2.1": "glm47",
    "poolside-Laguna-XS-2.1": "glm47",
    "poolside-Laguna-XS.2": "glm47",
    "tencent-Hy3": "plain",
    "unsloth-Apriel-1.5": "hermes",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "upstage-Solar-Open-100B": "plain",
}
"""What each template's model writes; `plain` for the families whose calls we don't read."""

OURS = {
    # Written by us after the notation of these families, whose templates are not in that package.
    "deepseek_v41": '<｜DSML｜ calls><｜DSML｜ invoke name="{{ call.name }}"></｜DSML｜ invoke></｜DSML｜ calls>',
    "functiongemma": "<start_function_declaration>{{ tool }}<end_function_declaration>{% if call %}"
    "<start_function_call>call:{{ call.name }}{{ '{' }}{{ '}' }}<end_function_call>{% endif %}",
    "phi4_mini": "<|system|>{{ system }}<|tool|>{{ tools | tojson }}<|/tool|><|end|><|user|>{{ user }}<|end|>",
    "pythonic": "If you call functions, write them in the form [func_name1(param1=value1), func_name2()]\n{{ tools }}",
}


def test_real_templates() -> None:
    if not FETCHED.exists():
        pytest.skip(f"the templates are not there: run {FETCH}")
    found = {path.stem: recognise(path.read_text(encoding="utf-8"), ()).name for path in FETCHED.glob("*.jinja")}
    assert found == REAL


@pytest.mark.parametrize("name", OURS)
def test_our_own_templates(name: str) -> None:
    assert recognise(OURS[name], ()).name == name


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        (None, (), "plain"),
        ("{{ messages }}", (), "plain"),
        (None, ("<s>", "[TOOL_CALLS]", "[ARGS]"), "mistral"),
        ("{{ messages }}", ("<|im_start|>", "<tool_call>", "</tool_call>"), "hermes"),
        ("{{ messages }}", ("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
        ("<tool_call>{{ x }}</tool_call>", ("[TOOL_CALLS]",), "hermes"),
    ],
)
def test_the_template_decides_then_the_special_tokens(template: str | None, tokens: tuple[str, ...], name: str) -> None:
    assert recognise(template, tokens).name == name


def test_plain_still_knows_reasoning() -> None:
    assert [(one.open, one.close) for one in FORMATS["plain"].thinking] == [("<think>", "</think>")]
