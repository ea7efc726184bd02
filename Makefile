# `make demo` and `make test` need Python 3.11 or newer; both set up .venv on first use, which downloads PyTorch.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
STEPS ?= 200

# The oldest torch of pyproject.toml, in an environment that all checkouts share: on Linux its package is the CUDA build.
OLDEST     := $(shell sed -nE 's/.*"torch>=([0-9.]+),.*/\1/p' pyproject.toml).0
OLDEST_ENV := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/legoai/torch-$(OLDEST)

# The tests start hundreds of processes, which would each compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Two halves side by side: many tests are ranks that wait for one another, or one process on one core.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-oldest-torch install-oldest-torch where-oldest-torch lint clean

help:
	@echo 'make demo      lint plans/tiny.plan, lower it, and train it on 4 local processes'
	@echo 'make test      run the tests but those marked slow: some fifteen minutes on two idle cores'
	@echo 'make test-all  run all tests: hours'
	@echo 'make test-oldest-torch  run the tests of torch'"'"'s private names on torch $(OLDEST), which is installed once (gigabytes)'
	@echo 'make lint      check style, types and import contracts'
	@echo 'make clean     remove .venv, runs and caches'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on PATH; set PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'setting up $(VENV) with $(PYTHON) (some minutes the first time)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check -qq install -e '.[dev]'
	@# Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each command would compile the sources anew.
	$(BIN)/python -m compileall -q dsl lowering runtime cost specs src
	@touch $@

demo: $(STAMP)
	$(BIN)/legoai lint plans/tiny.plan
	@mkdir -p runs/tiny
	$(BIN)/legoai lower plans/tiny.plan -o runs/tiny/tiny.py
	$(BIN)/legoai run plans/tiny.plan -- --steps $(STEPS)

test: $(STAMP)
	$(PYTEST) -m 'not slow'

test-all: $(STAMP)
	$(PYTEST)

$(OLDEST_ENV)/.installed:
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on PATH; set PYTHON=/path/to/python' >&2; exit 1; }
	@echo 'installing torch $(OLDEST) in $(OLDEST_ENV): some 5 GB, minutes, once'
	$(PYTHON) -m venv $(OLDEST_ENV)
	$(OLDEST_ENV)/bin/python -m pip --disable-pip-version-check -qq install --no-compile 'torch==$(OLDEST)' \
		'lark>=1.2,<2' 'numpy>=1.26' 'pydantic>=2.8,<3' 'transformers>=5' pytest pytest-timeout hypothesis setuptools \
		|| { echo 'make: torch $(OLDEST) cannot be installed: is the package index within reach?' >&2; exit 1; }
	@touch $@

install-oldest-torch: $(OLDEST_ENV)/.installed

test-oldest-torch: $(OLDEST_ENV)/.installed
	PYTHONPATH=$(CURDIR)/src $(OLDEST_ENV)/bin/python -m pytest -q -m 'not slow' tests/runtime/torch_internals

where-oldest-torch:
	@echo '$(OLDEST_ENV)'

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	rm -rf src/legoai.egg-info
