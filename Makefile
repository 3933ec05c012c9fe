# Two commands matter: `make demo` shows the library at work, `make test` proves it.
# Both build .venv from the pinned requirements when it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := src tests demo examples benchmarks tools
# Commands that compute run under this, with the instruction set that this processor survives.
CANARY := $(BIN)/python tools/cpu_canary.py --folder .venv
RUN := $(CANARY) $(BIN)/python
ARCHITECTURE_TESTS := tests/test_architecture.py
CONCURRENCY_SUITES := tests/faults tests/parity
SAMPLED_TESTS := tests/faults/test_interrupts_everywhere.py tests/faults/test_late_copies.py
CPU_SUITES := tests/parity tests/unit/optim tests/faults/test_step_overlap.py
# ATEN_CPU_CAPABILITY:ONEDNN_MAX_CPU_ISA:OMP_NUM_THREADS; every instruction set with one thread and with two.
CPU_COMBINATIONS := default:AVX512_CORE_BF16:1 avx2:AVX2:1 avx512:AVX512_CORE:1 \
  default:AVX2:2 avx2:AVX512_CORE:2 avx512:AVX512_CORE_BF16:2
GPU_TESTS := tests/gpu
MODEL_TESTS := tests/models/test_all_models.py tests/models/test_folded_trials.py
# Three workers for two cores: many tests wait for a process, a timeout or a link.
ON_ALL_CORES := -n $(shell expr $$(nproc) \* 3 / 2) --dist worksteal
# All models are tested with the pinned transformers, and with the newest release in another environment.
NEWEST_BIN := .venv-newest/bin
PINNED_RESULTS := build/models-pinned.jsonl
NEWEST_RESULTS := build/models-newest.jsonl
COMPILED_RESULTS := build/models-compiled.jsonl
# The documentation is built in an environment of its own: nothing that trains or tests needs these packages.
DOCS_BIN := .venv-docs/bin
DOCS_STAMP := .venv-docs/.installed

.PHONY: help cpu demo test check bench test-slow test-mutants test-kills test-forged test-20 test-cpus test-models test-models-newest test-models-compiled models-table what-fits wheel docs clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

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
	@rm -f .venv/.cpu-isa
	@touch $@

# Prints one line where torch's fastest instructions crash and slower ones are used; else nothing.
cpu: $(STAMP)
	@$(CANARY)

# The pins but for transformers, of which pip finds the newest release; torch is among the pins, so it is the same.
.PHONY: newest
newest: $(STAMP)
	@release=$$($(BIN)/pip index versions --disable-pip-version-check transformers 2>/dev/null | sed -nE '1s/.*\((.*)\).*/\1/p'); \
	[ -n "$$release" ] || { echo "error: pip finds no release of transformers" >&2; exit 1; }; \
	echo "the newest transformers is $$release"; \
	if [ ! -f .venv-newest/.installed-$$release ] || [ requirements-dev.txt -nt .venv-newest/.installed-$$release ]; then \
	  $(PYTHON) -m venv --clear .venv-newest && \
	  sed "s/^transformers==.*/transformers==$$release/" requirements-dev.txt > .venv-newest/requirements.txt && \
	  $(NEWEST_BIN)/pip install --quiet --disable-pip-version-check -r .venv-newest/requirements.txt && \
	  $(NEWEST_BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . && \
	  touch .venv-newest/.installed-$$release; \
	fi

demo: cpu  ## train, kill, resume on other devices, compare bit for bit; report and picture in demo-output/
	$(RUN) -m demo

# The GPU's tests run alone, because they measure its memory, and first, so that the last line counts the tests of every machine.
test: check  ## the checks, then every behaviour once (the GPU's are skipped without CUDA; of the models, a subset)
	$(RUN) -m pytest $(GPU_TESTS)
	$(RUN) -m pytest $(ON_ALL_CORES) --ignore=$(GPU_TESTS) -m "not models and not slow and not further"

# More orders of copies, more places to interrupt, and the combinations marked slow.
test-slow: export ROUNDPIPE_INTERRUPT_SAMPLES = 24
test-slow: export ROUNDPIPE_COPY_ORDERS = 20
test-slow: cpu  ## further combinations of what `make test` covers: device counts, precisions, seeds
	$(RUN) -m pytest $(ON_ALL_CORES) --ignore=$(GPU_TESTS) -m "(slow or further) and not models"
	$(RUN) -m pytest $(ON_ALL_CORES) $(SAMPLED_TESTS)

test-mutants: cpu  ## put deliberate faults into copies of the source; the tests must catch every one
	$(RUN) tests/mutants/run.py

test-kills: cpu  ## kill a training 100 times with SIGKILL, also during saves; its resumed losses must be exact
	$(RUN) tests/checkpoint/kill_runs.py 100

test-forged: export ROUNDPIPE_FORGED_MANIFESTS = 5000
test-forged: cpu  ## load 10,000 forged checkpoints; each must be refused without a trace, or loaded as it says
	$(RUN) -m pytest $(ON_ALL_CORES) tests/checkpoint/test_forged_manifests.py

test-machines-kills: export ROUNDPIPE_MACHINE_KILLS = 50
test-machines-kills: cpu  ## kill one of several machines 50 times with SIGKILL; the others must raise and name it
	$(RUN) -m pytest tests/machines/test_machines_faults.py -k killed

check: cpu  ## format, lint, strict types, architecture
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(RUN) -m pytest $(ARCHITECTURE_TESTS)

bench: cpu  ## run every benchmark; each prints ratios measured side by side in one run
	@shopt -s nullglob; \
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(RUN) "$$file"; done

test-20: export ROUNDPIPE_INTERRUPT_SAMPLES = 40
test-20: export ROUNDPIPE_COPY_ORDERS = 20
test-20: cpu  ## the concurrency suites, 20 times in a row, with more places to interrupt
	@for i in $$(seq 20); do echo "== round $$i of 20"; $(RUN) -m pytest $(ON_ALL_CORES) $(CONCURRENCY_SUITES); done

test-cpus: cpu  ## the parity and optimizer suites with other instruction sets, 1 and 2 threads; most of an hour
	@failed=; for combination in $(CPU_COMBINATIONS); do \
	  IFS=: read -r aten onednn threads <<< "$$combination"; \
	  settings="ATEN_CPU_CAPABILITY=$$aten ONEDNN_MAX_CPU_ISA=$$onednn OMP_NUM_THREADS=$$threads"; \
	  if [ $$aten != default ] && ! grep -qw "$${aten/avx512/avx512f}" /proc/cpuinfo; then \
	    echo "== $$settings: skipped, this processor has no $$aten"; continue; fi; \
	  echo "== $$settings"; \
	  env $$settings OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest $(ON_ALL_CORES) $(CPU_SUITES) || failed="$$failed $$combination"; \
	done; \
	[ -z "$$failed" ] || { echo "error: tests failed with$$failed" >&2; exit 1; }

test-models: cpu  ## every model of transformers that is known, and its variants, with the pinned release; an hour
	@mkdir -p build && rm -f $(PINNED_RESULTS)
	ROUNDPIPE_MODELS_RESULTS=$(PINNED_RESULTS) $(RUN) -m pytest $(ON_ALL_CORES) -m models $(MODEL_TESTS)

test-models-newest: newest cpu  ## the same with the newest release that pip finds, in .venv-newest
	@mkdir -p build && rm -f $(NEWEST_RESULTS)
	ROUNDPIPE_MODELS_RESULTS=$(NEWEST_RESULTS) $(CANARY) $(NEWEST_BIN)/python -m pytest $(ON_ALL_CORES) -m models $(MODEL_TESTS)

test-models-compiled: cpu  ## the same with compile=True, backend aot_eager; ROUNDPIPE_MODELS_SAMPLE=60 takes 60 of them
	@mkdir -p build && rm -f $(COMPILED_RESULTS)
	ROUNDPIPE_COMPILED_RESULTS=$(COMPILED_RESULTS) $(RUN) -m pytest $(ON_ALL_CORES) -m models tests/models/test_all_compiled.py
	$(RUN) tests/models/compiled_table.py $(COMPILED_RESULTS)

models-table: cpu  ## write docs/models.md from the results of the two
	$(RUN) tests/models/table.py $(PINNED_RESULTS) $(NEWEST_RESULTS)

what-fits: cpu  ## write docs/what-fits.md from `roundpipe estimate`; some minutes
	$(RUN) tools/what_fits.py

wheel: cpu  ## build sdist and wheels into dist/, and test the wheels in a clean environment
	$(RUN) tools/build_wheel.py

$(DOCS_STAMP): requirements-docs.txt
	$(PYTHON) -m venv --clear .venv-docs
	$(DOCS_BIN)/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

# The variable silences an announcement of the theme about another program.
docs: export NO_MKDOCS_2_WARNING = true
docs: $(DOCS_STAMP)  ## the documentation site, in build/site; broken links and pages without a place in the menu fail
	$(DOCS_BIN)/mkdocs build

clean:  ## remove what was built and produced, .venv and its relatives included
	rm -rf .venv .venv-newest .venv-docs build dist demo-output src/*.egg-info src/roundpipe/optim/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests demo examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
