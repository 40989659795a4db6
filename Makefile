# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0

.PHONY: help install quickstart test test-fast test-real lint clean

help:
	@echo "make quickstart   set up, then train a small model by RL on this machine (5 to 13 min)"
	@echo "make test         set up, then linters, fast tests, real-component tests (13 to 25 min)"
	@echo "make test-fast    set up, then the fast tests alone (< 5 min)"
	@echo "make lint         set up, then ruff, pyright, import-linter"
	@echo "make clean        remove the environment and the caches; runs/ stays"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/.installed

quickstart: install
	$(BIN)/python examples/arithmetic/quickstart.py --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test-fast: install
	$(BIN)/python -m pytest tests/fast tests/golden --numprocesses auto --maxprocesses 8 --dist loadfile

test-real: install
	$(BIN)/python -m pytest tests/real --timeout 600 --durations 10

test: lint test-fast test-real

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
