# `make train` and `make test` set up .venv themselves (see requirements/install.sh); a second call starts at once.
CONFIG ?= configs/frozenlake_cpu.py
WORKDIR ?= runs/$(basename $(notdir $(CONFIG)))
ARGS ?=
PYTHON ?= python3.11
export PYTHON
VENV_PYTHON := .venv/bin/python

.PHONY: help train test test-all serve-env lint format clean
.DEFAULT_GOAL := help

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'Variables: CONFIG=configs/NAME.py WORKDIR=runs/NAME ARGS="--config.seed=1"'

train: ## train an agent: warm-up, reinforcement learning, report in WORKDIR
	@requirements/install.sh train-cpu
	@$(VENV_PYTHON) -m scripts.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: ## lint, types, import contracts and the fast tests (what CI runs)
	@requirements/install.sh test-cpu
	@$(MAKE) --no-print-directory lint
	@$(VENV_PYTHON) -m pytest -n 2 -m "not slow" $(ARGS)

test-all: ## everything: the long suites, and vLLM among the engines
	@requirements/install.sh serve-cpu
	@$(MAKE) --no-print-directory lint
	@$(VENV_PYTHON) -m pytest -n 2 $(ARGS)

serve-env: ## add vLLM and the stock JetStream Driver to .venv (7 GB), for sampler.backend=vllm and bench_engine
	@requirements/install.sh serve-cpu

lint: ## ruff, mypy, import-linter
	@requirements/install.sh test-cpu
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@$(VENV_PYTHON) -m mypy
	@.venv/bin/lint-imports

format: ## rewrite the code in the house form
	@requirements/install.sh test-cpu
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
