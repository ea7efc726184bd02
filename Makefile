# `make demo` and `make test` need Python 3.11 or newer; both set up .venv on first use, which downloads PyTorch.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
STEPS ?= 200

# The tests start hundreds of processes, which would each compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Two halves side by side: many tests are ranks that wait for one another, or one process on one core.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint clean

help:
	@echo 'make demo      lint plans/tiny.plan, lower it, and train it on 4 local processes'
	@echo 'make test      run the tests but those marked slow: about 12 minutes on two idle cores'
	@echo 'make test-all  run all tests: about an hour'
	@echo 'make lint      check style, types and import contracts'
	@echo 'make clean     remove .venv, runs and caches'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on PATH; set PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'setting up $(VENV) with $(PYTHON) (some minutes the first time)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check -qq install -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/legoai lint plans/tiny.plan
	$(BIN)/legoai lower plans/tiny.plan -o runs/tiny/tiny.py
	$(BIN)/legoai run plans/tiny.plan -- --steps $(STEPS)

test: $(STAMP)
	$(PYTEST) -m 'not slow'

test-all: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	rm -rf src/legoai.egg-info
