# Two commands matter: `make demo` shows the library at work, `make test` proves it.
# Both build .venv from the pinned requirements when it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := src tests demo examples benchmarks
ARCHITECTURE_TESTS := tests/test_architecture.py
CONCURRENCY_SUITES := tests/faults tests/parity
GPU_TESTS := tests/gpu
ON_ALL_CORES := -n auto --dist worksteal

.PHONY: help demo test check bench test-20 clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# The library itself is installed without its dependencies: torch comes from the pin and from nowhere else.
$(STAMP): requirements-dev.txt pyproject.toml setup.py
	@command -v $(PYTHON) > /dev/null || { \
	  echo "error: $(PYTHON) was not found; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "run: make PYTHON=python3.11" >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)  ## train a small language model three ways; report and picture in demo-output/
	$(BIN)/python -m demo.train_demo

# The GPU's tests run alone, because they measure its memory, and first, so that the last line counts the tests of every machine.
test: check  ## the checks, then every test (those of the GPU are skipped without CUDA)
	$(BIN)/python -m pytest $(GPU_TESTS)
	$(BIN)/python -m pytest $(ON_ALL_CORES) --ignore=$(GPU_TESTS)

check: $(STAMP)  ## format, lint, strict types, architecture
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARCHITECTURE_TESTS)

bench: $(STAMP)  ## run every benchmark; each prints ratios measured side by side in one run
	@shopt -s nullglob; \
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done

test-20: $(STAMP)  ## the concurrency suites, 20 times in a row
	@for i in $$(seq 20); do echo "== round $$i of 20"; $(BIN)/python -m pytest $(ON_ALL_CORES) $(CONCURRENCY_SUITES); done

clean:  ## remove what was built and produced, .venv included
	rm -rf .venv build dist demo-output src/*.egg-info src/roundpipe/optim/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests demo examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
