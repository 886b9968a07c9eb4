# The commands of this project. `make demo` and `make test` set up what they need by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Hundreds of processes of the tests would compile the same sources again where the environment forbids to keep what was compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow test-gpu soak check bench clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tlora needs Python 3.11 or newer; $(PYTHON) is older. Remedy: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "this Python cannot make virtual environments. Remedy on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/python demo/run.py

test test-slow soak: export PYTHONDONTWRITEBYTECODE = # what one process compiles, the hundreds after it need not

# One more than there are cores, as tests wait for processes and disks; each takes a GiB or two.
MANY = $(or $(WORKERS),$(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))'))

test: $(READY)
	$(BIN)/python -m pytest -m 'not gpu and not soak and not slow' -n $(MANY) --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m 'slow and not gpu and not soak' -n $(MANY) --dist worksteal

soak: $(READY)
	$(BIN)/python -m pytest -m 'not gpu' -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu -n $(or $(WORKERS),auto --maxprocesses=14) $(if $(PART),--part $(PART))

bench: $(READY)
	$(BIN)/python bench/cpu.py

clean:
	rm -rf $(VENV) out demo/out
