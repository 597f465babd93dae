# make quickstart: train a real model on this machine. make test, make check: what CI runs.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/quickstart.toml

.PHONY: quickstart install dev test check format constraints docs

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

test: dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

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
