# Every target makes the environment it needs, and is quick when it is there. `make help` lists them.

# Pick another Python 3.11 with PYTHON=/path/to/python3.11, another index of CPU builds with TORCH_INDEX=URL.
PYTHON ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Other versions of vLLM to check than the pinned one: make test-vllm VERSIONS="0.20.0 0.30.0"
VERSIONS ?=
# Further arguments for pytest: make test ARGS="tests/moe -x"
ARGS ?=
# Processes that test files run in; 0 is this one, for a debugger.
WORKERS ?= 2
# Each file in one process, for its fixtures; in the order of tests/conftest.py, not of how many tests a file has.
AT_ONCE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

PY := .venv/bin/python
VLLM_PY := .venv-vllm/bin/python
SETUP = $(BOOTSTRAP) scripts/setup_env.py --torch-index "$(TORCH_INDEX)" --python "$(PYTHON)"
# The tests start hundreds of processes, which would each compile the package anew where this is set, as in many
# containers.
unexport PYTHONDONTWRITEBYTECODE

# The set-up itself runs on whatever python3 there is; it then looks for the version it needs.
BOOTSTRAP = $(shell for python in $(PYTHON) python3 python3.11 python3.12 python3.13 python3.10 python; do \
	[ "$$("$$python" -c 'import sys; print(sys.version_info >= (3, 8))' 2>/dev/null)" = True ] && \
	{ echo "$$python"; exit; }; done; echo no_python)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm browser demo test test-core test-vllm lint format bench wheel-check clean clean-env

# Where there is no Python at all, BOOTSTRAP is this function's name.
define needs_python
@no_python() { echo "set-up: failed: no Python on this machine; install Python 3.11 with its venv module, then run make again" >&2; exit 1; };
endef

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: ## make .venv: CPU torch and everything pinned (about 2 minutes the first time)
	$(needs_python) $(SETUP) dev

setup-vllm: ## make .venv-vllm: the same with vLLM's CPU build (about 3.5 GB)
	$(needs_python) $(SETUP) vllm

browser: ## install the browser that the pages of traces are tried in (Debian and Ubuntu; needs root or sudo)
	@scripts/install_browser.sh

demo: setup ## run the demonstration
	@.venv/bin/dbo-greenlet run

test: setup ## run the tests
	@$(PY) -m pytest $(AT_ONCE) $(ARGS)

test-core: ## run the core's tests on every other supported Python found, without torch
	$(needs_python) $(BOOTSTRAP) scripts/run_core_tests.py

ifeq ($(strip $(VERSIONS)),)
test-vllm: setup-vllm ## run the tests that need vLLM; VERSIONS="0.20.0 0.30.0" checks other versions of it
	@$(VLLM_PY) -m pytest $(AT_ONCE) -m vllm $(ARGS)
else
test-vllm: setup
	@$(PY) scripts/check_vllm_versions.py --torch-index "$(TORCH_INDEX)" --python "$(PYTHON)" $(VERSIONS) -- $(ARGS)
endif

lint: setup ## ruff, its formatter, and mypy --strict on the core and the test kit
	@failed=0; \
	echo "lint: ruff check"; $(PY) -m ruff check . || failed=1; \
	echo "lint: ruff format --check"; $(PY) -m ruff format --check . || failed=1; \
	echo "lint: mypy --strict on the core and the test kit"; $(PY) -m mypy || failed=1; \
	exit $$failed

format: setup ## rewrite the sources as `make lint` wants them
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: setup ## run the benchmarks that run on a CPU
	@for script in $(filter-out scripts/bench_gpu%,$(wildcard scripts/bench_*.py)); do \
		echo "bench: $$script"; $(PY) "$$script" || exit 1; done

wheel-check: setup ## build the wheel and check it in clean environments
	@$(PY) scripts/check_wheel.py

clean: ## remove what builds, checks and tests leave behind
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dbo_greenlet tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: ## remove the environments
	rm -rf .venv .venv-vllm .venv-vllm-* .venv-core-*
