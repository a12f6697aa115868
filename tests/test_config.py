"""models.toml: what is accepted, and the one line that each mistake gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from citadel.app import check_formats
from citadel.config import Config, ConfigError, load
from engines import CATALOGUE

ROOT = Path(__file__).parent.parent
MODEL = '[models.m]\nengine = "replay"\nsource = "script.jsonl"\n'


def read(folder: Path, text: str) -> Config:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


@pytest.mark.parametrize("name", ["models.toml", "examples/models.gpu.toml"])
def test_the_files_in_the_repository_are_valid(name: str) -> None:
    config = load(ROOT / name)
    check_formats(config)
    assert {model.engine for model in config.models.values()} <= set(CATALOGUE)


def test_the_checked_in_file_serves_the_small_model_through_both_engines() -> None:
    models = load(ROOT / "models.toml").models
    llama = models["smollm2"]
    assert (llama.engine, llama.effective_slots, llama.effective_max_parallel) == ("llama", 16, 16)
    vllm = models["smollm2-vllm"]
    assert (vllm.engine, vllm.effective_mode, vllm.effective_slots) == ("hyperqwen", "batch", 64)
    assert vllm.effective_max_parallel is None


def test_the_gpu_example_configures_the_fleet() -> None:
    models = load(ROOT / "examples/models.gpu.toml").models
    assert {id_: (model.engine, model.effective_mode, model.effective_slots) for id_, model in models.items()} == {
        "qwen3.8-27b": ("hyperqwen", "batch", 64),
        "qwen3.8-27b-fast": ("hyperqwen", "single", 8),
        "qwen3.8-27b-uncensored": ("hyperqwen", "batch", 64),
        "qwen3.8-flash-next-abliterated": ("hyperqwen", "batch", 64),
        "deepseek-v4.1-flash": ("hyperqwen", "batch", 64),
        "gemma-4-12b": ("llama", None, 4),
        "qwen3-235b-a22b": ("strata", None, 2),
    }


def test_engine_tables_are_passed_through_as_they_are(tmp_path: Path) -> None:
    text = '[models.m]\nengine = "hyperqwen"\nsource = "a/b"\n[models.m.vllm]\ntensor_parallel_size = 2\n'
    text += 'distributed_executor_backend = "ray"\nquantization = "fp8"\n'
    options = read(tmp_path, text).models["m"].options
    assert options == {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "quantization": "fp8"}


MISTAKES = {
    "an unknown table": ("[sever]\nport = 1\n" + MODEL, "sever: unknown key; the nearest known one is 'server'"),
    "an unknown server key": (
        "[server]\nprot = 1\n" + MODEL,
        "server.prot: unknown key; the nearest known one is 'port'",
    ),
    "an unknown model key": (
        MODEL + "contex_length = 5\n",
        "models.m.contex_length: unknown key; the nearest known one is 'context_length'",
    ),
    "an unknown sampling key": (
        MODEL + "[models.m.sampling]\ntemprature = 1\n",
        "models.m.sampling.temprature: unknown key; the nearest known one is 'temperature'",
    ),
    "a wrong type": (MODEL + 'slots = "four"\n', "models.m.slots: input should be a valid integer, not 'four'"),
    "a number out of range": (
        MODEL + "slots = 0\n",
        "models.m.slots: input should be greater than or equal to 1, not 0",
    ),
    "a required key missing": ('[models.m]\nengine = "replay"\n', "models.m.source: this key is required"),
    "an unknown engine": (
        '[models.m]\nengine = "vlm"\nsource = "x"\n',
        "models.m.engine: input should be 'hyperqwen', 'llama', 'strata' or 'replay', not 'vlm'",
    ),
    "another engine's table": (
        MODEL + "[models.m.llama]\nn_ctx = 1\n",
        "models.m: the table 'llama' is not for the engine 'replay', whose own is 'replay'",
    ),
    "a mode where there is none": (
        MODEL + 'mode = "batch"\n',
        "models.m: mode is for hyperqwen only, and this is replay",
    ),
    "no models": ("[models]\n", "models: there is none; a model is a table [models.NAME]"),
    "a default that is not there": (
        '[server]\ndefault_model = "n"\n' + MODEL,
        "server.default_model: there is no model 'n'; the nearest known one is 'm'",
    ),
    "an alias that is taken": (MODEL + 'aliases = ["m"]\n', "models.m.aliases: 'm' is a model already"),
    "a template that is not there": (
        MODEL + 'chat_template = "no.jinja"\n',
        "models.m.chat_template: there is no file",
    ),
    "no TOML": ("[models\n", "is no TOML:"),
    "a back-off the wrong way round": (
        MODEL + "backoff_s = [300, 10]\n",
        "models.m.backoff_s: the first wait is longer than the longest",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_the_keys_path(tmp_path: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'models.toml'}: {expected}")
    assert "\n" not in message


def test_a_format_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.format: there is no format 'qwen9'"):
        check_formats(read(tmp_path, MODEL + 'format = "qwen9"\n'))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "missing.toml"], "missing.toml: there is no such file"),
        (["--config", "models.toml"], "models.toml: models.m.sorce: unknown key; the nearest known one is 'source'"),
    ],
)
def test_the_command_line_ends_with_2_and_no_traceback(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "models.toml").write_text(MODEL + 'sorce = "x"\n', encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "citadel", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (2, expected)
