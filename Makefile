# Two commands from nothing: `make demo` and `make test`. Each creates .venv itself and installs with constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
# Triton's kernels run on the CPU too. Only for this one: the other backends would take them up and be slow.
INTERPRETED := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
# Another seventh of the conformance suite every day. For `make test-all` all of it, with the large shapes, and nothing
# left out for kernels that run in an interpreter.
PART = $(if $(CROSSPACK_TEST_ALL),--thorough,--part $(shell expr $$(date +%s) / 86400 % 7 + 1)/7)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all judge judge-interpreted lint types docs clean

demo: .venv/.demo
	$(BIN)/crosspack train --compare --steps 24 --output runs/demo --overwrite

# Two workers on two cores: with a thread for every core each, torch's threads would wait for one another.
test: export OMP_NUM_THREADS = 1
test: .venv/.dev
	$(BIN)/python -m pytest tests --numprocesses 2 --dist loadscope
	$(MAKE) $(if $(CROSSPACK_TEST_ALL),WORKERS="--numprocesses 2 --dist loadgroup",--jobs 2) judge judge-interpreted

# A part is small: two runs beside each other import the frameworks twice, and workers would in every process.
judge:
	$(BIN)/python -m pytest conformance --all $(WORKERS) $(PART)

# Triton has wheels for Linux alone, and a backend that is named must load.
judge-interpreted:
	@if $(BIN)/python -c 'import triton' 2> /dev/null; \
	then $(INTERPRETED) $(BIN)/python -m pytest conformance $(WORKERS) $(PART) --backend torch:triton; \
	else echo 'torch:triton is not judged: Triton is not installed'; fi

# Also what `make test` takes by turns: before a release, and after a change to conformance/.
test-all: export CROSSPACK_TEST_ALL = 1
test-all: test

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
