# Two commands from nothing: `make demo` and `make test`. Each creates .venv itself and installs with constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# Triton's kernels run on the CPU too. Only for this one: the other backends would take them up and be slow.
INTERPRETED := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-quick gate-part gate-part-interpreted test-rest test-all test-gpu test-two-gpus test-bounds test-main test-pages lint types docs clean

demo: .venv/.demo
	$(BIN)/crosspack train --compare --steps 24 --output runs/demo --overwrite

# The tiers of the suite: CONTRIBUTING.md, tests/tiers.py. Two workers on two cores: with a thread for every core each,
# torch's threads would wait for one another.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# No implicit promotion in JAX, as in tests/jax_backend/conftest.py.
GATE = JAX_NUMPY_DTYPE_PROMOTION=strict JAX_NUMPY_RANK_PROMOTION=raise $(PYTEST) conformance
SUITE = $(PYTEST) tests --numprocesses 2 --dist loadscope --no-loadscope-reorder
# `make test-all SHARD=2/6` runs one of six shards; the conformance suite belongs to the last one.
SHARDED = $(if $(SHARD),--shard $(SHARD))
LAST = $(if $(SHARD),$(filter $(lastword $(subst /, ,$(SHARD))),$(firstword $(subst /, ,$(SHARD)))),yes)

# Modules are compiled once, and not by each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

# Each backend is judged by a twenty-eighth of the tests, neighbours by different ones, and every requirement on some backend.
# All at once: the gate's two parts fill the time in which one of the two workers has nothing left to do.
test: .venv/.dev
	$(MAKE) --jobs 3 test-quick gate-part gate-part-interpreted

test-quick: .venv/.dev
	$(SUITE) --tier quick

gate-part: .venv/.dev
	$(GATE) --all --part 1/28 --each

gate-part-interpreted: .venv/.dev
	$(call interpreted,--part 1/28)

# What `make test` leaves out.
test-rest: .venv/.dev
	$(SUITE) --tier rest $(SHARDED)
	$(if $(LAST),$(GATE) --all --thorough --numprocesses 2 --dist loadgroup)
	$(if $(LAST),$(call interpreted,--thorough --numprocesses 2 --dist loadgroup))

test-all: .venv/.dev
	$(SUITE) --tier all $(SHARDED)
	$(if $(LAST),$(GATE) --all --thorough --numprocesses 2 --dist loadgroup)
	$(if $(LAST),$(call interpreted,--thorough --numprocesses 2 --dist loadgroup))

# Triton has wheels for Linux alone, and a backend that is named must load.
interpreted = @if $(BIN)/python -c 'import triton' 2> /dev/null; \
	then $(INTERPRETED) $(GATE) $(1) --backend torch:triton; \
	else echo 'torch:triton is not judged: Triton is not installed'; fi

# On a machine with a GPU, with its own torch and JAX: PYTHON names their interpreter. `SHARD=k/n` divides it too.
test-gpu:
	$(PYTHON) -m tests.gpu $(SHARDED)

test-two-gpus:
	$(PYTHON) -m tests.gpu --two $(SHARDED)

# With the oldest and the newest accelerate, peft, trl and transformers that are allowed.
test-bounds: .venv/.dev
	$(BIN)/python -m tests.bounds

# With the main branches of transformers and TRL: needs git and the network.
test-main: .venv/.dev
	$(BIN)/python -m tests.bounds main

# Pages, examples, and what is generated from code: pictures and tables.
GENERATED = $(addprefix tests/torch_backend/hf/test_,accepted.py families.py expert_families.py)
test-pages: .venv/.dev
	$(PYTEST) -m "not slow" tests/house tests/cli/test_examples.py tests/*/test_docs.py $(GENERATED)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

# Into site/, without network. A dead link, a page outside of the navigation or a misnamed parameter is an error.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Crosspack needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[torch,hf,plot]'
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[all,dev]'
	@touch $@

clean:
	rm -rf .venv build dist site *.egg-info
