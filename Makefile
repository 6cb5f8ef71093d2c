# Everything runs in .venv, which `make setup` makes and keeps up to date with pyproject.toml.
#
#   make serve ARGS="--port 8000"     make test ARGS="-k radix"     make setup PYTHON=python3.12
#
# On a machine without a GPU, torch's CPU build is a tenth of the size. Its public index:
#   make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# Without PYTHON= a .venv that is there stays with its own Python.
PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
TORCH_INDEX_URL ?=
TORCH := torch>=2.11,<2.14
STAMP := $(VENV)/.setup-$(PYTHON_VERSION)
ARGS ?=

.PHONY: help setup cpu-kernels serve test test-slow lint flags

help:
	@echo "make setup      create .venv and install the engine with its tests' tools (TORCH_INDEX_URL=, PYTHON=)"
	@echo "make serve      start engine-serve (ARGS=\"--port 8000\")"
	@echo "make test       the fast tests"
	@echo "make test-slow  the tests that need the default model or more time"
	@echo "make lint       ruff and ty"
	@echo "make flags      rewrite the README's table of flags"

setup: $(STAMP) cpu-kernels

# Where there is no C++ compiler this says so, and torch does the work.
cpu-kernels: $(STAMP)
	@$(BIN)/python -m kernels.cpu.build

$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON_VERSION)" ]; then \
	  echo "setup: $(PYTHON) does not run. Install Python 3.11 or newer, or say PYTHON=/path/to/python." >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "setup: $(PYTHON) is Python $(PYTHON_VERSION); 3.11 or newer is needed (PYTHON=/path/to/python)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || [ -x $(BIN)/pip ] || { \
	  echo "setup: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@have=$$($(BIN)/python -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true); \
	if [ "$$have" != "$(PYTHON_VERSION)" ] || [ ! -x $(BIN)/pip ]; then \
	  echo "setup: creating $(VENV) with Python $(PYTHON_VERSION)"; $(PYTHON) -m venv --clear $(VENV); fi
	@echo "setup: upgrading pip"
	@$(BIN)/python -m pip install --quiet --upgrade pip
ifneq ($(TORCH_INDEX_URL),)
	@echo "setup: installing $(TORCH) from $(TORCH_INDEX_URL)"
	@$(BIN)/python -m pip install --quiet --index-url '$(TORCH_INDEX_URL)' '$(TORCH)'
endif
	@echo "setup: installing the engine and its tests' tools (torch is large: this may take minutes)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -e '.[test]'
	@rm -f $(VENV)/.setup-*
	@touch $@
	@echo "setup: done"

serve: setup
	@echo "serve: engine-serve $(ARGS)"
	@exec $(BIN)/engine-serve $(ARGS)

test: setup
	@echo "test: the fast tests"
	@$(BIN)/pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup
	@echo "test-slow: the tests that need the default model or more time"
	@$(BIN)/pytest -m "slow and not gpu" $(ARGS)

lint: setup
	@echo "lint: ruff check"
	@$(BIN)/ruff check .
	@echo "lint: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "lint: ty check"
	@$(BIN)/ty check

flags: setup
	@echo "flags: the README's table"
	@$(BIN)/python tools/flags_table.py
