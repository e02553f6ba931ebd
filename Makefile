# make demo    audit the bundled sample logs and print where the page is
# make test    everything that must pass before a change is accepted
# Both set up first, in .venv, and do it once. Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install

# One line per step; what the installers say goes to a log, and its end is shown when a step fails.
LOG := $(VENV)/setup.log
LOGGED = >>$(LOG) 2>&1 || { tail -n 30 $(LOG) >&2; echo "setup: failed, all of it is in $(LOG)" >&2; exit 1; }

.PHONY: setup demo test lint
setup: $(VENV)/installed

demo: $(VENV)/installed
	@$(BIN)/leadline demo

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict detector

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "setup: Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@mkdir -p $(VENV)
	@echo "setup: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) $(LOGGED)
	@$(PIP) --upgrade pip $(LOGGED)
	@# On Linux the package index's torch brings gigabytes of CUDA. Without a GPU the CPU build is wanted: from
	@# an index or folder that pip is set up with, else through uv, which knows where that build is kept.
	@if [ "$$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then \
	  echo "setup: torch for CPU (no GPU here)"; \
	  { $(PIP) "torch==2.13.0+cpu" || { $(PIP) uv && \
	    $(BIN)/uv pip install --python $(BIN)/python --torch-backend=cpu "torch>=2.9"; }; } >>$(LOG) 2>&1 || \
	  echo "setup: no CPU build of torch found, taking the large one with CUDA"; \
	fi
	@echo "setup: leadline and what it needs (minutes)"
	@$(PIP) --editable . $(LOGGED)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "setup: what the tests need"
	@$(PIP) --group dev $(LOGGED)
	@touch $@
