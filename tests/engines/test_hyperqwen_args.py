"""How `hyperqwen` starts vLLM, and what it thinks a load takes; no vLLM is needed to know either."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from citadel.engine import EngineSpec, Need
from citadel.errors import LlmUnavailable
from engines import hyperqwen_memory as memory
from engines.gguf_header import NotGguf, parameters, read_header
from engines.gguf_parts import read_table
from engines.hyperqwen_args import CHECKED_FORMAT, Plan, check_options, check_workers, make_plan

GB = 10**9
MULTIPLIES_16_BITS = memory.multiplies_16_bits
CONFIG = {
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
}
TOKEN_BYTES = 10 * 2 * 2 * 64 * 2
"""Layers, key and value, heads, their width, bytes of a bfloat16."""


def spec(source: Path = Path("model"), slots: int = 4, context: int | None = 1024, **options: Any) -> EngineSpec:
    return EngineSpec("m", source, "batch", slots, context, None, Path("cache"), options)


@pytest.fixture(autouse=True)
def _a_processor_with_kernels_for_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "multiplies_16_bits", lambda: True)


def plan(platform: Any = "cpu", owner: dict[str, str] | None = None, context: int | None = 1024, **options: Any):
    return make_plan(spec(**options), Path("folder"), platform, context, None, 123, [0, 1, 2, 3], owner or {})


def checkpoint(folder: Path, config: dict[str, Any], weights: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return folder


# The arguments.


def test_an_engine_has_the_owners_slots_context_and_cache():
    arguments = plan().arguments
    assert arguments["model"] == "folder"
    assert (arguments["max_num_seqs"], arguments["max_model_len"], arguments["kv_cache_memory_bytes"]) == (4, 1024, 123)


def test_grammars_are_llguidances_without_free_whitespace():
    wanted = {"backend": "guidance", "disable_any_whitespace": True}
    assert plan().arguments["structured_outputs_config"] == plan("gpu").arguments["structured_outputs_config"] == wanted


@pytest.mark.parametrize("context", [512, 4096, 131072])
def test_on_a_cpu_a_prompt_is_never_computed_in_parts(context: int):
    arguments = plan(context=context).arguments
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= context


def test_a_context_in_the_options_counts_for_that_too():
    assert plan(max_model_len=100_000).arguments["max_num_batched_tokens"] == 100_000


def test_on_a_gpu_vllm_keeps_its_defaults():
    added = {"enforce_eager", "enable_chunked_prefill", "max_num_batched_tokens", "block_size"}
    assert not added & plan("gpu").arguments.keys()


def test_without_a_known_context_vllm_finds_its_own():
    assert "max_model_len" not in plan(context=None).arguments


def test_options_win():
    arguments = plan(enforce_eager=False, enable_chunked_prefill=True, quantization="awq").arguments
    assert (arguments["enforce_eager"], arguments["enable_chunked_prefill"]) == (False, True)
    assert arguments["quantization"] == "awq"


def test_missing_tensors_are_looked_for_unless_the_owner_brings_workers_or_a_loader():
    assert plan().arguments["load_format"] == CHECKED_FORMAT
    assert plan(load_format="dummy").arguments["load_format"] == "dummy"
    assert "load_format" not in plan(worker_extension_cls="mine.Worker").arguments


def single(platform: Any, **options: Any):
    wanted = EngineSpec("m", Path("model"), "single", 8, 1024, None, Path("cache"), options)
    return make_plan(wanted, Path("folder"), platform, 1024, None, 123, [0, 1], {})


def test_the_mode_of_low_latency_guesses_on_a_gpu_and_says_so():
    assert single("gpu").arguments["speculative_config"]["method"] == "ngram"
    assert "ngram guesses 4 tokens" in single("gpu").layout
    assert "speculative_config" not in plan("gpu").arguments
    assert "speculative_config" not in single("cpu").arguments


def test_the_owner_says_how_to_guess_and_an_empty_table_is_not_at_all():
    theirs = {"model": "draft", "num_speculative_tokens": 3}
    assert single("gpu", speculative_config=theirs).arguments["speculative_config"] == theirs
    assert "speculative_config" not in single("gpu", speculative_config={}).arguments


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tensor_paralel_size", "did you mean 'tensor_parallel_size'"),
        ("zzz", "vLLM has no option 'zzz'$"),
        ("model", "set source of the model instead"),
        ("max_num_seqs", "set slots of the model instead"),
        ("disable_log_stats", "it is fixed"),
    ],
)
def test_an_option_that_vllm_lacks_or_that_is_ours_is_refused(option: str, said: str):
    with pytest.raises(LlmUnavailable) as caught:
        check_options(spec(**{option: 1}), ["tensor_parallel_size", "model", "max_num_seqs", "disable_log_stats"])
    assert re.search(said, caught.value.fields["reason"])


# The environment.


def test_on_a_cpu_the_worker_is_in_the_engines_process_and_leaves_one_core_free():
    environment = plan().environment
    assert (environment["VLLM_ENABLE_V1_MULTIPROCESSING"], environment["OMP_NUM_THREADS"]) == ("0", "3")


@pytest.mark.parametrize(
    ("chosen", "compiles"), [(plan(), False), (plan(enforce_eager=False), True), (plan("gpu"), True)]
)
def test_torch_compiles_nothing_where_vllm_does_not(chosen: Plan, compiles: bool):
    assert (chosen.environment.get("TORCHDYNAMO_DISABLE") == "1") is not compiles


def test_on_a_cpu_the_engines_memory_is_in_huge_pages():
    assert plan().environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "GLIBC_TUNABLES" not in plan("gpu").environment
    owners = plan(owner={"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}).environment["GLIBC_TUNABLES"]
    assert owners == "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"


def test_what_the_owner_set_stays():
    owner = {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CONFIGURE_LOGGING": "1"}
    owner |= {"TORCHDYNAMO_DISABLE": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    chosen = plan(owner=owner)
    assert {**owner, **chosen.environment}.items() >= owner.items()
    assert "OMP_NUM_THREADS=2" in chosen.layout


def test_parallel_workers_on_a_cpu_are_processes_with_cores_of_their_own():
    chosen = plan(tensor_parallel_size=2)
    assert chosen.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert chosen.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "OMP_NUM_THREADS" not in chosen.environment


def test_more_workers_than_cores_are_not_bound():
    assert plan(tensor_parallel_size=4, pipeline_parallel_size=2).environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize("size", ["two", 0, -1, 1.5])
def test_a_number_of_workers_is_a_positive_integer(size: Any):
    with pytest.raises(LlmUnavailable, match="m cannot be started") as caught:
        plan(tensor_parallel_size=size)
    assert "tensor_parallel_size" in caught.value.fields["reason"]


@pytest.mark.parametrize(
    ("platform", "gpus", "options", "said"),
    [
        ("cpu", 0, {"distributed_executor_backend": "ray"}, "no Ray on a CPU"),
        ("cpu", 0, {"enable_sleep_mode": True}, "no sleep mode on a CPU"),
        ("cpu", 0, {"tensor_parallel_size": 3}, "its 8 attention heads can't be shared equally by"),
        ("cpu", 0, {"pipeline_parallel_size": 11}, "its 10 layers are fewer than pipeline_parallel_size = 11"),
        ("gpu", 2, {"tensor_parallel_size": 4}, "spread over 4 GPUs and this box has 2"),
        ("gpu", 2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "spread over 4 GPUs and this box has 2"),
    ],
)
def test_workers_that_cannot_be_had_are_refused_before_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: Any, gpus: int, options: dict[str, Any], said: str
):
    monkeypatch.setattr(memory, "_gpus", lambda: gpus)
    source = checkpoint(tmp_path / "m", CONFIG)
    with pytest.raises(LlmUnavailable) as caught:
        memory.need(spec(source, **options), platform)
    assert said in caught.value.fields["reason"]


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("cpu", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}),
        ("gpu", {"tensor_parallel_size": 2}),
        ("gpu", {"tensor_parallel_size": 8, "distributed_executor_backend": "ray"}),
        ("gpu", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}),
        ("gpu", {"enable_sleep_mode": True}),
    ],
)
def test_workers_that_can_be_had_are_not(platform: Any, options: dict[str, Any]):
    check_workers(spec(**options), platform, heads=8, layers=10, gpus=2)


def test_what_spreads_a_model_reaches_vllm_as_it_is():
    options = {"tensor_parallel_size": 8, "distributed_executor_backend": "ray", "nnodes": 2}
    assert plan("gpu", **options).arguments.items() >= options.items()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_vllm_tells_nobody_and_never_forks(platform: str):
    environment = plan(platform).environment
    assert (environment["VLLM_NO_USAGE_STATS"], environment["DO_NOT_TRACK"]) == ("1", "1")
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_of_a_cores_hardware_threads_one_computes(tmp_path: Path):
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert memory.physical_cores([3, 2, 1, 0], tmp_path) == [0, 1]
    assert memory.physical_cores([2, 3], tmp_path) == [2, 3]
    assert memory.physical_cores([8, 9], tmp_path) == [8, 9]  # nothing is known of them


# The type of number.


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("flags\t\t: fpu sse4_2 fma avx2 f16c", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 avx_ne_convert", True),
        ("Features\t: fp asimd", True),  # not an x86, and nothing was measured on one
    ],
)
def test_whether_a_processor_multiplies_16_bits_is_read_from_its_flags(tmp_path: Path, line: str, has: bool):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: one\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert MULTIPLIES_16_BITS(file) is has


def test_where_nothing_is_known_of_the_processor_vllm_chooses(tmp_path: Path):
    assert MULTIPLIES_16_BITS(tmp_path / "none")


def test_a_processor_that_does_not_computes_in_float32_unless_the_owner_or_the_weights_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
):
    assert memory.dtype(spec(), CONFIG, "cpu") is None
    monkeypatch.setattr(memory, "multiplies_16_bits", lambda: False)
    assert memory.dtype(spec(), CONFIG, "cpu") == "float32"
    assert memory.dtype(spec(), CONFIG, "gpu") is None
    assert memory.dtype(spec(dtype="bfloat16"), CONFIG, "cpu") == "bfloat16"


QUANTIZED = {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"quantization_config": QUANTIZED}, {}),
        ({"compression_config": QUANTIZED}, {}),
        ({"text_config": CONFIG | {"quantization_config": QUANTIZED}}, {}),
        ({"quantization_config": QUANTIZED, "text_config": CONFIG | {"quantization_config": None}}, {}),
        ({}, {"quantization": "fp8"}),
        ({}, {"quantization_config": {"linear": "fp8"}}),
    ],
)
def test_of_a_quantized_model_vllm_chooses_the_type_and_the_weights_stay_as_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], options: dict[str, Any]
):
    monkeypatch.setattr(memory, "multiplies_16_bits", lambda: False)
    assert memory.dtype(spec(**options), CONFIG | config, "cpu") is None
    source = checkpoint(tmp_path / "m", CONFIG | config)
    write_tensors(source, weight=("BF16", 1000, 2000))
    size = (source / "model.safetensors").stat().st_size
    found = memory.shape(spec(source, dtype="float32", **options), "cpu")
    assert (found.weights, found.token_bytes, found.dtype) == (size, 2 * TOKEN_BYTES, None)


def test_the_type_reaches_vllm_and_the_log():
    chosen = make_plan(spec(), Path("folder"), "cpu", 1024, "float32", 123, [0, 1], {})
    assert chosen.arguments["dtype"] == "float32"
    assert chosen.layout.endswith("computing in float32")
    assert "computing" not in make_plan(spec(), Path("folder"), "cpu", 1024, "auto", 123, [0, 1], {}).layout
    assert "dtype" not in plan().arguments


def write_tensors(folder: Path, file: str = "model", **kinds: tuple[str, int, int]) -> None:
    """A file of tensors: of each its type, its numbers and their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, numbers, size) in kinds.items():
        header[name] = {"dtype": kind, "shape": [numbers], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / f"{file}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.mark.parametrize("config", [{"torch_dtype": "bfloat16"}, {"dtype": None}, {}])
@pytest.mark.parametrize(("kind", "width"), [("BF16", 2), ("F32", 4)])
def test_weights_take_what_the_numbers_of_the_files_take_in_the_type_that_is_computed_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    kind: str,
    width: int,
):
    source = checkpoint(tmp_path / "m", CONFIG | config)
    write_tensors(source, norm=("F32", 1200, 4800), weight=(kind, 1000, 1000 * width), other=(kind, 900, 900 * width))
    write_tensors(source, "second", weight=("BF16", 500, 1000))
    assert memory.shape(spec(source), "cpu").weights == 2 * 3600  # of float32, too, vLLM makes 16 bits
    found = memory.shape(spec(source, dtype="float32"), "gpu")
    assert (found.weights, found.token_bytes, found.dtype) == (4 * 3600, 2 * TOKEN_BYTES, "float32")
    monkeypatch.setattr(memory, "multiplies_16_bits", lambda: False)
    assert memory.shape(spec(source), "cpu") == found


def test_weights_of_another_kind_of_number_are_counted_as_they_are(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG)
    write_tensors(source, weight=("F8_E4M3", 1000, 1000), scale=("BF16", 10, 20))
    assert memory.shape(spec(source, dtype="float32"), "cpu").weights == 1000 + 4 * 10


@pytest.mark.parametrize("header", [b"[]", b"null", b"{", b"[" * 100_000, b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b""])
def test_a_file_whose_header_is_none_counts_as_it_is_and_is_told_of_by_the_load(tmp_path: Path, header: bytes):
    source = checkpoint(tmp_path / "m", CONFIG)
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert memory.shape(spec(source), "cpu").weights == 8 + len(header)


def test_an_owners_figure_that_float32_is_too_large_for_is_refused_before_a_load_with_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = checkpoint(tmp_path / "m", CONFIG)
    write_tensors(source, weight=("BF16", 10_000_000, 20_000_000))

    def owners(**options: Any) -> EngineSpec:
        return EngineSpec("m", source, "batch", 4, 1024, int(1.53 * GB), tmp_path, options)

    assert memory.need(owners(), "cpu").ram == int(1.53 * GB)
    monkeypatch.setattr(memory, "multiplies_16_bits", lambda: False)
    said = 'weights take 0.04 in float32 .* nothing for the cache; dtype = "bfloat16" takes half'
    with pytest.raises(LlmUnavailable) as caught:
        memory.need(owners(), "cpu")
    assert re.search(said, caught.value.fields["reason"])
    assert memory.need(owners(dtype="bfloat16"), "cpu").ram == int(1.53 * GB)
    with pytest.raises(LlmUnavailable) as caught:
        memory.need(owners(dtype="float32"), "cpu")
    assert caught.value.fields["reason"].endswith("nothing for the cache")
    with pytest.raises(LlmUnavailable) as caught:
        memory.need(replace(owners(), memory_bytes=int(1.51 * GB)), "cpu")
    assert caught.value.fields["reason"].endswith("nothing for the cache")  # nor would half of them fit


# The memory.


def test_a_load_takes_weights_a_cache_for_the_slots_and_vllm_itself(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG, weights=5000)
    need = memory.need(spec(source, slots=16), "cpu")
    tokens = 16 * 1024 // 4
    assert need.gpu == 0
    assert need.ram - 5000 - tokens * TOKEN_BYTES - 1.5 * GB == pytest.approx(0, abs=64 * TOKEN_BYTES)


def test_the_cache_has_room_for_one_full_context_at_least(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG)
    assert memory.kv_bytes(spec(source, slots=1, context=None), "cpu") >= 4096 * TOKEN_BYTES


def test_a_multimodal_models_measures_are_its_text_models(tmp_path: Path):
    plain = checkpoint(tmp_path / "plain", CONFIG)
    nested = checkpoint(tmp_path / "nested", {"model_type": "both", "text_config": CONFIG})
    assert memory.shape(spec(nested), "cpu") == memory.shape(spec(plain), "cpu")


def test_a_latent_cache_is_counted_as_such(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert memory.shape(spec(source), "cpu").token_bytes == 10 * (512 + 64) * 2


def test_the_owners_figure_is_the_need_and_the_cache_gets_the_rest(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG, weights=5000)
    owners = EngineSpec("m", source, "batch", 4, 1024, 4 * GB, tmp_path)
    assert memory.need(owners, "cpu") == Need(ram=4 * GB)
    assert memory.kv_bytes(owners, "cpu") == 4 * GB - 5000 - 1.5 * GB
    assert memory.need(owners, "gpu").gpu == 4 * GB


def test_a_figure_that_leaves_no_cache_is_refused_with_the_numbers(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG)
    with pytest.raises(LlmUnavailable) as caught:
        memory.need(EngineSpec("m", source, "batch", 4, 1024, 1 * GB, tmp_path), "cpu")
    assert "it may use 1.00 GB" in caught.value.fields["reason"]
    assert "vLLM itself 1.50" in caught.value.fields["reason"]


def test_a_worker_with_a_process_of_its_own_takes_more(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG)
    alone, two = (memory.need(spec(source, tensor_parallel_size=size), "cpu").ram for size in (1, 2))
    assert two - alone == 2 * 0.9 * GB


def test_the_cache_is_shared_out_among_the_workers(tmp_path: Path):
    source = checkpoint(tmp_path / "m", CONFIG)
    alone = memory.kv_bytes(spec(source), "cpu")
    assert memory.kv_bytes(spec(source, tensor_parallel_size=2), "cpu") == alone // 2
    assert memory.kv_bytes(spec(source, tensor_parallel_size=2, kv_cache_memory_bytes=77), "cpu") == 77


@pytest.mark.parametrize("missing", ["model", "empty/"])
def test_a_source_without_weights_is_refused(tmp_path: Path, missing: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LlmUnavailable):
        memory.need(spec(tmp_path / missing), "cpu")


# Where the model comes from.


def test_the_revision_is_the_hubs_commit_where_the_path_names_it(tmp_path: Path):
    folder = checkpoint(tmp_path / "models--x--y" / "snapshots" / "0123abcd", CONFIG)
    assert memory.revision(folder, folder) == "0123abcd"


def test_else_it_changes_with_the_files(tmp_path: Path):
    folder = checkpoint(tmp_path / "m", CONFIG)
    before = memory.revision(folder, folder)
    assert memory.revision(folder, folder) == before
    checkpoint(folder, CONFIG, weights=1001)
    after = memory.revision(folder, folder)
    checkpoint(folder, CONFIG | {"hidden_size": 1024}, weights=1001)
    assert len({before, after, memory.revision(folder, folder)}) == 3


def test_importing_the_adapter_imports_neither_vllm_nor_torch():
    code = "import sys, engines.hyperqwen; print({'vllm', 'torch', 'transformers'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


# The head of a GGUF file.


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(pairs: bytes = b"", count: int = 0, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + pairs + tensors


def test_a_header_is_read_without_its_long_arrays(tmp_path: Path):
    file = tmp_path / "m.gguf"
    words = text("vocabulary") + struct.pack("<IIQ", 9, 8, 2000) + text("word") * 2000
    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    pairs += words + text("llama.block_count") + struct.pack("<II", 4, 12)
    pairs += text("llama.heads") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<III", 1, 2, 3)
    tensors = text("a") + struct.pack("<IQQIQ", 2, 5, 7, 0, 0) + text("b") + struct.pack("<IQIQ", 1, 6, 0, 160)
    file.write_bytes(gguf(pairs, 4, tensors, 2))
    table = read_table(file)
    assert (table.count("block_count"), table.count("heads"), table.count("absent")) == (12, 3, 0)
    assert table.metadata["vocabulary"] is None
    assert parameters(table.tensors) == 5 * 7 + 6


@pytest.mark.parametrize(
    "content",
    [b"", b"no", b"no model at all", b"GGUF", gguf(count=3), b"GGUF" + struct.pack("<I", 9), gguf(b"\xff" * 40, 1)],
    ids=["empty", "short", "text", "magic", "cut", "version", "garbage"],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(NotGguf):
        read_header(file)
    with pytest.raises(LlmUnavailable):
        memory.need(spec(file), "cpu")
