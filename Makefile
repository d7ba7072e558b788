# Everything happens in .venv, which `make install` makes from $(PYTHON) with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format soak docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with pinned dependencies (skipped when up to date)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "groupwise needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there):" \
			"install one and run make again with PYTHON=python3.11 (or newer)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

quickstart: install  ## train the embedded model on arithmetic: base -> warm start -> GRPO
	$(BIN)/groupwise train quickstart

test: install  ## the fast suite, about ten minutes on two cores
	$(BIN)/python -m pytest --timeout 300

lint: install  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: install  ## long checks: minutes to hours
	$(BIN)/python -m pytest -m soak

docs: $(DOCS_STAMP)  ## build the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:  ## remove caches (the environment, runs and downloaded models stay)
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build
	find src tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} +
