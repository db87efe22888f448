# All targets work on a fresh machine: they create the environment first, `make quickstart` without the development tools.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
RUNTIME = $(VENV)/.runtime
STAMP = $(VENV)/.installed
export PIP_CONSTRAINT = $(CURDIR)/constraints.txt

.PHONY: quickstart test test-every transformers-tests check site recipes faults bench gpu clean

quickstart: $(RUNTIME)
	$(BIN)/guide quickstart

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Also runs the cases that `make test` leaves out of large sampled tests.
test-every: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --every --numprocesses 3 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The tests that transformers has for all its models, without a plan and with plans that change nothing; fetches their source, takes
# half a minute for each family and plan.
transformers-tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.transformers_contract.common_tests

# The documentation as a site, site/index.html.  Its search needs a server: python3 -m http.server --directory site
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Kill stages, or make them fail, at every file-related system call; needs strace and a few minutes.
faults: $(STAMP)
	$(BIN)/python -m tests.faults.sweep

# The short ones of the measurements in docs/results; each table there names its command.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_cost
	$(BIN)/python -m benchmarks.text_speed
	$(BIN)/python -m benchmarks.cooccurrence
	$(BIN)/python -m benchmarks.masks_speed

# Every mechanism on a GPU against the CPU, what steps cost there, and which claims fail: docs/results/gpu.md, in eight minutes.
# `python3 -m benchmarks.gpu` is the same where torch, transformers and pyarrow are installed already.
gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu

# The recipes of the papers at tiny scale whose data are there, each of which goes on where it was; see recipes/README.md.  Those of
# paper C test nothing at this size.
RECIPES ?= $(filter-out recipes/c-%,$(wildcard recipes/?-*.sh))

recipes: $(RUNTIME)
	for recipe in $(RECIPES); do GUIDE=$(CURDIR)/$(BIN)/guide sh $$recipe || echo "$$recipe stopped with code $$?" >&2; done

$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(RUNTIME) $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
