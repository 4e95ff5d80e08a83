# Every target sets up what it needs in .venv first; a second run only does what changed.
#
#   make test                        the only command to type after a clone
#   PYTHON=python3.12 make test      with another Python: .venv is made anew if it has a different one
#   make test PYTEST_ARGS='-k ring'  more arguments for pytest
#
# Needed on the machine: Python 3.10 or later with its venv module, Rust with cargo, a C linker, make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PYTEST_ARGS ?=
# Interpreters that `make wheel` tries the wheel in; by default the one of .venv.
WHEEL_PYTHONS ?= $(BIN)/python

# Build tools find the environment by these, whatever else is active in the shell.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH

UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust -name '*.rs' -o -name Cargo.toml)

say = @printf '\033[1m==> %s\033[0m\n' '$(1)'

.PHONY: help demo test test-rust test-loom test-python lint lint-rust lint-python bench wheel setup build format clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# --- the environment ---------------------------------------------------------------------------------

# The Python asked for, or else the first one that is new enough. Looked up only where it is used.
find_python = for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then echo "$$candidate"; exit; fi; \
	done; \
	echo 'No Python 3.10 or later found; name one with PYTHON=...' >&2; exit 1

# With PYTHON given, an environment of another version has to go.
ifdef PYTHON
ifneq ($(wildcard $(BIN)/python),)
version_of = $(shell $(1) -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)
ifneq ($(call version_of,$(PYTHON)),$(call version_of,$(BIN)/python))
$(STAMPS)/venv: FORCE
endif
endif
endif

.PHONY: FORCE
FORCE:

$(STAMPS)/venv:
	$(call say,Python environment in $(VENV))
	@python=$$($(find_python)); \
	wanted=$$("$$python" -c 'import sys; print(*sys.version_info[:3], sep=".")'); \
	if [[ -n '$(PYTHON)' && "$$($(BIN)/python -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)" != "$$wanted" ]]; then \
	  rm -rf $(VENV); \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  "$$python" -m venv --clear $(VENV) \
	    || { echo "$$python can't make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@$(BIN)/python --version
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dependencies: pyproject.toml $(STAMPS)/venv
	$(call say,Python packages (torch and the development tools))
	@$(UV_INSTALL) --requirements pyproject.toml --extra cli --extra dev
	@touch $@

$(STAMPS)/extension: $(RUST_SOURCES) pyproject.toml $(STAMPS)/dependencies
	$(call say,native extension zenflow._core (release build))
	@cargo --version >/dev/null || { echo 'Rust is needed: cargo was not found' >&2; exit 1; }
	@$(BIN)/maturin develop --release --uv --quiet
	@touch $@

$(STAMPS)/release-tools: pyproject.toml $(STAMPS)/dependencies
	$(call say,release tools (zig, abi3audit, twine))
	@$(UV_INSTALL) --group release
	@touch $@

setup: $(STAMPS)/dependencies  ## make .venv with everything in it but the extension
build: $(STAMPS)/extension  ## build and install the extension into .venv

# --- the targets -------------------------------------------------------------------------------------

demo: $(STAMPS)/extension  ## watch it work: zenflow demo
	@$(BIN)/zenflow demo

test: test-rust test-loom test-python  ## Rust tests, the loom model check, Python tests, benchmarks at tiny sizes

# The binding has no Rust tests of its own, and without it no test needs to link Python.
test-rust: $(STAMPS)/venv
	$(call say,Rust tests)
	@if cargo nextest --version >/dev/null 2>&1; then \
	  cargo nextest run -p zenflow-core; \
	  cargo test -p zenflow-core --doc; \
	else \
	  cargo test -p zenflow-core; \
	fi

# Optimised because loom runs each test many thousand times; link-time optimisation would only cost time here.
# LOOM_MAX_PREEMPTIONS, where it is set, replaces the bound in the test file.
test-loom:
	$(call say,loom model check of the ring)
	@RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=target/loom \
	  CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=none \
	  cargo test --release -p zenflow-core --test loom_ring

test-python: $(STAMPS)/extension
	$(call say,Python tests)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: lint-rust lint-python  ## formatting, clippy, ruff, mypy, the stub against the binary

lint-rust: $(STAMPS)/venv
	$(call say,cargo fmt and clippy)
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings

lint-python: $(STAMPS)/extension
	$(call say,ruff)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	$(call say,mypy)
	@$(BIN)/mypy
	$(call say,stubtest: _core.pyi against the binary)
	@$(STUBTEST)

# The stub and the binary stand alone in a package of their own, and torch's types are not followed: a second
# in place of the minute that analysing torch takes.
define STUBTEST
stage=target/stubtest; rm -rf $$stage; mkdir -p $$stage/zenflow; \
	touch $$stage/zenflow/__init__.py; cp python/zenflow/_core.pyi python/zenflow/_core*.so $$stage/zenflow; \
	printf '[mypy]\nfollow_imports = skip\n' >$$stage/mypy.ini; cd $$stage; \
	PYTHONPATH=. MYPYPATH=. $(CURDIR)/$(BIN)/python -m mypy.stubtest zenflow._core --mypy-config-file mypy.ini
endef

format: $(STAMPS)/dependencies  ## format everything in place
	@cargo fmt --all
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(STAMPS)/extension  ## time the benchmarks at their full sizes
	$(call say,benchmarks)
	@ZENFLOW_BENCH_FULL=1 $(BIN)/python -m pytest bench --benchmark-enable $(PYTEST_ARGS)

# zig links against glibc 2.17, so the wheel runs on every Linux since 2014; flags meant for the host's own
# compiler would only confuse it.
wheel: $(STAMPS)/release-tools  ## a manylinux2014 abi3 wheel in dist/, inspected and tried in a clean environment
	$(call say,wheel)
	@rm -f dist/*.whl
	@env -u CFLAGS -u CXXFLAGS -u CPPFLAGS -u LDFLAGS -u RUSTFLAGS -u CC -u CXX \
	  $(BIN)/maturin build --release --strip --zig --compatibility manylinux2014 --out dist
	$(call say,abi3audit and twine check)
	@$(BIN)/abi3audit --strict --summary dist/*.whl
	@$(BIN)/twine check --strict dist/*.whl
	$(call say,ten steps from the wheel with no compiler in reach)
	@$(BIN)/python tests/wheel_smoke.py dist/*.whl $(WHEEL_PYTHONS)

clean:  ## remove what was built, keep .venv
	@rm -rf target dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@rm -f python/zenflow/*.so $(STAMPS)/extension
	@find python tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	@rm -rf $(VENV)
