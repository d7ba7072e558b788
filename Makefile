# Everything happens in .venv, which is made from $(PYTHON) with the versions of constraints.txt. `make install` installs what users need;
# the targets for developers install their tools first.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
USER_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help install dev quickstart test test-all test-gpu first-light first-light-bundle lint format soak docs wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(USER_STAMP)  ## make .venv with what training needs (skipped when up to date)

dev: $(DEV_STAMP)  ## the same with the developers' tools, which the targets below bring themselves

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "groupwise needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there):" \
			"install one and run make again with PYTHON=python3.11 (or newer)" >&2; exit 1; }
	@test ! -e $(VENV) || { echo "$(VENV) is there without bin/python: remove it and run make again" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(USER_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@ $(USER_STAMP)

$(DOCS_STAMP): $(DEV_STAMP)
	$(PIP) --editable '.[docs]'
	@touch $@

quickstart: install  ## train the embedded model on arithmetic: base -> warm start -> GRPO
	$(BIN)/groupwise train quickstart

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 --numprocesses $(WORKERS) --dist worksteal \
	--durations 30 --durations-min 3

test: dev  ## the fast tests, in two processes of one thread each (WORKERS=N for N)
	$(PYTEST) -m 'not slow and not soak'

test-all: dev  ## the fast and the slow tests, as .ci/run does
	$(PYTEST)

test-gpu: dev  ## the tests that need a CUDA GPU; every other test takes the CPU, on every machine
	$(BIN)/python -m pytest --timeout 300 -m gpu

first-light: install  ## look at all that is predicted of a GPU, in ten minutes; docs/gpu.md says what it looks at
	$(BIN)/python benchmarks/first_light.py

first-light-bundle: install  ## what a machine without network needs for it, in build/first-light-bundle
	$(BIN)/python -m benchmarks.first_light_bundle

lint: dev  ## style, types, the direction of imports, the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/hadolint Dockerfile

format: dev  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: dev  ## long checks: minutes to hours
	$(BIN)/python -m pytest -m soak

docs: $(DOCS_STAMP)  ## build the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: dev  ## build the wheel in build/wheel and try it in an environment of its own
	$(BIN)/python scripts/try_wheel.py

clean:  ## remove caches (the environment, runs, downloaded models and what first light wrote stay)
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build/wheel build/site build/lib build/bdist.*
	find src tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} +
