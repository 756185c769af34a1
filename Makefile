# Everything happens in .venv, which the first target that needs it creates. Name another interpreter with
# `make PYTHON=python3.12 demo`; to have pip use an index or a folder of wheels of yours, set its own PIP_* variables.

PYTHON ?= python3
PROMPT ?= def fibonacci(n):
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Most modules of what is installed are never imported: Python compiles the others when they are, and pip need not compile all.
INSTALL := $(PIP) install --no-compile

# One stamp for each set of installed packages: repeated runs install nothing, a changed pyproject.toml installs again.
CORE   := $(VENV)/.installed-core
TEST   := $(VENV)/.installed-test
DEV    := $(VENV)/.installed-dev
SOURCE := pyproject.toml setup.py core/polydraft/_version.py $(wildcard backends/cpu/polydraft_cpu/src/*)
EMULATED := $(wildcard plugins/paddle-emu-device/src/* plugins/paddle-emu-device/setup.py plugins/paddle-device-skeleton/*.py \
    plugins/paddle-emu-device/polydraft_paddle_emu/*.py plugins/paddle-emu-device/polydraft_paddle_emu/lists/* \
    plugins/paddle-device-skeleton/include/paddle_device/*)

# Commands are run hundreds of times by the tests and the kit; none of them should compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two targets would install into the same .venv at once
.PHONY: help demo test check conform matrix deep oldest coverage pages format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(CORE)  ## generate text with the embedded demo model on the default backend
	$(BIN)/polydraft generate "$(PROMPT)" --draft-tokens 3

# One thread a product: the tests use tiny matrices, and threads that spin for each other are slow on a busy machine.
test conform matrix deep oldest coverage: export OPENBLAS_NUM_THREADS := 1
test conform matrix deep oldest coverage: export OMP_NUM_THREADS := 1
test: $(TEST)  ## run every test that needs no accelerator
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(DEV)  ## lint, formatting, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pre-commit validate-config

conform: $(TEST)  ## claim `basic` of every backend that needs no accelerator, and the most of one in turn
	$(BIN)/python tools/conform_in_turn.py

matrix: $(TEST)  ## run the kit and its mutants on those backends and write docs/backends/matrix.md and mutants.md
	$(BIN)/python tools/make_matrix.py
	$(BIN)/python tools/make_mutants.py

# Run again at the same commit it goes on where it was stopped, unless FRESH is set.
deep: $(TEST)  ## run the tests that take minutes each, and the combinations that `test` leaves out
	$(BIN)/python -m pytest $(if $(FRESH),,-p tests.support.resumed) -n 2 --dist load -v -m deep --timeout=1800 --hypothesis-profile=deep

# Nearly a gigabyte, so it is neither part of `test` nor of `deep`.
oldest:  ## run the tests of the Paddle backends on the oldest Paddle they support, in .venv-paddle-oldest
	$(PYTHON) -m venv .venv-paddle-oldest
	.venv-paddle-oldest/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[conform,grammar,paddle]' 'paddlepaddle==3.2.0' pytest-xdist jsonschema 'setuptools>=77' wheel
	.venv-paddle-oldest/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation plugins/paddle-emu-device
	@rm -rf plugins/paddle-emu-device/build
	.venv-paddle-oldest/bin/python -m pytest -n 2 --dist loadfile tests/paddle

coverage: $(TEST)  ## run the tests with branch coverage of core, which must not fall below 95 %
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term-missing:skip-covered

pages: $(CORE)  ## write the pages that are made from the code
	$(BIN)/python tools/make_commands.py
	$(BIN)/python tools/make_evidence_page.py

format: $(DEV)  ## apply the fixes and the formatting that `make check` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv, build products and caches
	rm -rf $(VENV) .venv-paddle-oldest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	rm -f backends/cpu/polydraft_cpu/_kernels.* backends/cpu/polydraft_cpu/_build_failure.txt
	find core backends plugins tests \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} + 2>/dev/null || true

$(CORE): $(SOURCE) | $(BIN)/python
	@echo "installing polydraft into $(VENV)" >&2
	@$(INSTALL) --editable .
	@touch $@

# The file that names Intel's runtime to the loader in pyopencl's wheel; its own names a folder of its maker.
define REGISTER_OPENCL
import pathlib, pyopencl, sys
folder = pathlib.Path(pyopencl.__file__).parent / ".libs"
folder.mkdir(exist_ok=True)
(folder / "intel.icd").write_text(f"{sys.prefix}/lib/libintelocl.so\n")
endef
export REGISTER_OPENCL

# At once where there is Paddle, since each installation takes long.
$(TEST): $(SOURCE) $(EMULATED) | $(BIN)/python
	@echo "installing polydraft with its test extra into $(VENV); PyTorch is a large download" >&2
	@$(INSTALL) --editable '.[test,paddle]' 'setuptools>=77' wheel 2>/dev/null || $(INSTALL) --editable '.[test]' 'setuptools>=77'
	@$(INSTALL) --no-deps --no-build-isolation --editable plugins/emulator
	@$(INSTALL) pyopencl intel-opencl-rt intel-cmplr-lib-rt >/dev/null 2>&1 && $(BIN)/python -c "$$REGISTER_OPENCL" \
	    || echo "OpenCL on the CPU (wheels for x86-64 alone) could not be installed; tests of its backend will be skipped" >&2
	@$(INSTALL) --no-deps --no-build-isolation plugins/paddle-emu-device >/dev/null 2>&1 \
	    || echo "Paddle or its emulated device (which needs a C++ compiler) could not be installed; their tests will be skipped" >&2
	@rm -rf plugins/paddle-emu-device/build
	@touch $(CORE) $@

$(DEV): $(SOURCE) | $(BIN)/python
	@echo "installing polydraft with its dev extra into $(VENV)" >&2
	@$(INSTALL) --editable '.[dev]'
	@touch $(CORE) $@

# pip 21.3 was the first with editable installs from pyproject.toml alone, and interpreters exist that bring an older one.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	    echo "polydraft needs Python 3.10 or newer, but there is no command $(PYTHON); install it or name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "polydraft needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "$(PYTHON) cannot create $(VENV); install its venv module (Debian and Ubuntu: apt install python3-venv) and run make again" >&2; exit 1; }
	@$(PIP) install 'pip>=21.3'
