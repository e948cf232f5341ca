# Two commands matter: `make demo` shows the whole idea on a real model, `make test` checks it.
# Both do all set-up (a virtual environment in .venv) and skip what is already there.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := install

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
MODEL := models/smollm2-135m

# Tests never use the network or more threads than they say.
TEST_ENV := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
            RAY_USAGE_STATS_ENABLED=0

.PHONY: install demo test test-long lint format proto model help clean

install: $(INSTALLED)  ## install Tandem and all it needs into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@echo "==> set-up: creating .venv and installing the tested versions (about two minutes)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed; set PYTHON=..."; exit 2; }
	@# torch first and by exact version: an open range would pull gigabytes of CUDA libraries.
	@$(BIN)/pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
	  "$$(grep '^torch==' constraints.txt)" 2> >(grep -v '^WARNING: Location' >&2) \
	  | grep -E '^(Collecting|Installing|Successfully)' || test $${PIPESTATUS[0]} -eq 0
	@$(BIN)/pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
	  -e '.[dev]' 2> >(grep -v '^WARNING: Location' >&2) \
	  | grep -E '^(Collecting|Installing|Successfully)' || test $${PIPESTATUS[0]} -eq 0
	@touch $(INSTALLED)
	@echo "==> set-up done: the command is $(BIN)/tandem"

demo: $(INSTALLED)  ## fetch the model, answer a question, show the freeze and its absence
	@echo "==> demo: $(BIN)/tandem demo"
	@$(BIN)/tandem demo

model: $(INSTALLED)  ## fetch the small model that demo and tests use
	@$(BIN)/tandem model fetch smollm2-135m

lint: $(INSTALLED)  ## style, types, floors, file lengths
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "error: run 'make format'"; exit 1; }
	@echo "==> mypy"
	@$(BIN)/mypy protocol kernels kv_transfer prefill_worker decode_worker router cluster
	@echo "==> import-linter: the floors"
	@$(BIN)/lint-imports | sed -n '/^Contracts:/p;/BROKEN/,$$p'
	@$(BIN)/python .ci/file_lengths.py

format: $(INSTALLED)  ## let ruff format and fix
	@$(BIN)/ruff format -q . && $(BIN)/ruff check --fix -q .

test: lint  ## lint, then the fast suite (12 minutes at most, set-up included)
	@echo "==> pytest: the fast suite"
	@$(TEST_ENV) $(BIN)/python -m pytest -q -m 'not long and not gpu' --durations=10

test-long: $(INSTALLED)  ## what is too slow for `make test` (45 minutes at most)
	@echo "==> the model that the long suite needs"
	@$(BIN)/tandem model fetch smollm2-135m
	@echo "==> pytest: the long suite"
	@$(TEST_ENV) $(BIN)/python -m pytest -q -m 'long and not gpu' --durations=10

proto: $(INSTALLED)  ## regenerate protocol/wire/*_pb2* from the .proto files
	@$(BIN)/python -m protocol.wire.generate

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

clean:  ## remove caches and build products; keeps .venv and models
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
