# Needs Python >= 3.11, git and make; everything else is installed into .venv.
#
#   make demo            one real rollout batch end to end, no GPU
#   make test            the tests that need only what make can install
#   make test-engine     the tests against a real vLLM on the CPU (downloads about 0.6 GB); with ENGINE=sglang (or
#                        vllm) and URL=http://... against a server that runs already, MODEL=... if it serves several,
#                        CHECKPOINT=... the folder of its model, for comparing log-probabilities (needs transformers)
#   make test-docker     the tests against a real Docker daemon, which .ci/docker-up starts where there is none (then root)
#   make test-apptainer  the tests against a real Apptainer, which .ci/apptainer-up makes (needs root, downloads about 60 MB)
#   make test-harnesses  runs every agent program that a preset installs through the conformance suite, in local
#                        sandboxes and in Docker (as make test-docker); what is installed stays in HARNESS_CACHE;
#                        ARGS="-k codex" for one; writes the table of docs/harnesses.md anew
#   make fuzz            looks for what breaks the proxy, FUZZ_S seconds long (60), with atheris where it can be installed
#   make chaos           kills and restarts workers, proxies and Redis, sets clocks and fails callbacks, under load for
#                        CHAOS_S seconds (200), then proves that nothing was lost or counted twice; ARGS="--seed 7"
#                        repeats a run's choices
#   make lint            ruff, mypy (strict, tests too), import contracts
#   make lock            writes constraints.txt anew
#   make clean           removes what make made
#
# ARGS goes to the program: make demo ARGS="--keep", make test ARGS="tests/cli -x". PYTHON=python3.12 chooses another one.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
ARGS ?=
ENGINE ?= vllm
URL ?=
MODEL ?=
CHECKPOINT ?=
FUZZ_S ?= 60
CHAOS_S ?= 200

BIN := $(VENV)/bin
# Byte-code is made at install, by all cores: the first start is as fast as the second, also where
# PYTHONDONTWRITEBYTECODE is set.
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt

# Where it is set, polarq itself would be compiled anew at each start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-engine test-docker test-apptainer test-harnesses fuzz chaos lint lock clean

demo: $(VENV)/.demo
	@$(BIN)/polarq demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest -m "not docker and not engine and not apptainer and not harness and not harbor" -n 3 --dist worksteal $(ARGS)

test-engine: $(if $(URL),$(VENV)/.dev)
	POLARQ_ENGINE='$(ENGINE)' POLARQ_ENGINE_URL='$(URL)' POLARQ_ENGINE_MODEL='$(MODEL)' \
		POLARQ_ENGINE_CHECKPOINT='$(CHECKPOINT)' POLARQ_ENGINE_PYTHON='$(abspath $(BIN))/python' bash .ci/engine $(ARGS)

test-docker: $(VENV)/.dev
	PYTEST='$(abspath $(BIN))/pytest' bash .ci/docker $(ARGS)

test-apptainer: $(VENV)/.dev
	bash .ci/apptainer-up
	$(BIN)/pytest -m apptainer -n 2 --dist worksteal tests/runtimes $(ARGS)

test-harnesses: $(VENV)/.dev
	PYTEST='$(abspath $(BIN))/pytest' bash .ci/harnesses $(ARGS)

fuzz: $(VENV)/.dev
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/uv pip install --quiet --python $(BIN)/python atheris || \
		echo "atheris is not for this Python: inputs are made by plain mutation" >&2
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) $(ARGS)

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.durable.chaos --seconds $(CHAOS_S) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests examples benchmarks
	$(BIN)/lint-imports

lock: $(VENV)/.uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate --no-header \
		--no-emit-index-url pyproject.toml --extra demo --extra dev --extra flower --output-file constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says what is in the environment, so that a second run has nothing to do.
$(VENV)/.uv:
	@test -n "$(PYTHON)" || { echo "polarq needs Python 3.11 or newer; install it, or: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; choose another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

$(VENV)/.demo: $(VENV)/.uv pyproject.toml constraints.txt
	@echo "installing polarq with the demo's agent"
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.uv pyproject.toml constraints.txt
	@echo "installing polarq with everything for development"
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.demo
