# The one door to everything a developer does here. `make` alone prints the targets.
# The environment lives in .venv/ and is rebuilt when the lock or pyproject.toml changes; the tests run against the
# built wheel, unpacked in .venv/wheel, which is rebuilt when a source file changes. A stock vLLM, for the tests that need
# one, lives beside it in .venv/vllm with a Python environment of its own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK := $(VENV)/quick
PACKAGES := kvoffload plugins
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
VLLM := $(VENV)/vllm/bin/python
NEW_ENOUGH := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvoffload needs Python 3.11 or newer; name one with PYTHON=")'
FAST_MARKS := not slow and not gpu and not vllm
SOURCES := $(shell find $(PACKAGES) -not -path '*__pycache__*' 2>/dev/null)

# The wheel is found before the editable install; safe path keeps the working directory out of `python -m` and `-c`,
# also in the processes that tests start.
WHEEL := $(CURDIR)/$(VENV)/wheel
AGAINST_WHEEL := KVOFFLOAD_WHEEL=$(WHEEL) PYTHONPATH=$(WHEEL) PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1

.DEFAULT_GOAL := help
.PHONY: help venv demo quick test test-fast test-vllm check lint types imports size format tools vllm-versions bench-hooks bench-queue bench-serve docs lock dashboards site grafana screenshot observe simulate soak deep explore mutants coverage wheel vllm-env vllm-demo kernel-env clean
.DELETE_ON_ERROR:

help:  ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/ready  ## set up .venv with the locked versions and the sources as they lie here
	@:

demo: venv  ## the same conversations without and with offloading, in one table
	@$(BIN)/kvoffload demo $(ARGS)

vllm-env:  ## set up a stock vLLM beside the project, in .venv/vllm
	@$(PYTHON) tests/vllm_stock/install.py $(VLLM_ENV_ARGS)

vllm-demo: vllm-env  ## the same conversations with a stock `vllm serve`, without and with kvoffload
	@$(VLLM) tests/vllm_stock/demo.py $(ARGS)

quick: $(QUICK)/ready  ## the tests of core, bus and model on the sources: no wheel, no torch, seconds
	HYPOTHESIS_PROFILE=fast PYTHONPATH=$(CURDIR) PYTHONDONTWRITEBYTECODE=1 $(QUICK)/bin/python -m pytest -m "$(FAST_MARKS)" -q $(or $(ARGS),tests/core tests/bus tests/model)

test: $(VENV)/wheel/ready vllm-env kernel-env  ## every test that this machine can run, against the built wheel
	@.ci/tools || echo "Tests that need those programs are skipped."
	HYPOTHESIS_PROFILE=ci $(AGAINST_WHEEL) $(BIN)/pytest -m "not vllm" $(ARGS)
	@$(if $(ARGS),echo "ARGS chose tests; those on a stock vLLM: make test-vllm ARGS=...",$(MAKE) --no-print-directory test-vllm)

test-fast: $(VENV)/wheel/ready  ## the quick tests alone, in about a minute
	HYPOTHESIS_PROFILE=fast $(AGAINST_WHEEL) $(BIN)/pytest -m "$(FAST_MARKS)" $(ARGS)

test-vllm: $(VENV)/wheel/ready vllm-env  ## the tests on stock vLLMs alone, against the built wheel; of several versions first
	@$(if $(ARGS),,$(MAKE) --no-print-directory vllm-versions VERSIONS_ARGS=--check)
	HYPOTHESIS_PROFILE=ci $(AGAINST_WHEEL) $(VLLM) -m pytest -m vllm $(or $(ARGS),$(filter-out tests/vllm_versions,$(wildcard tests/vllm_*)))

vllm-versions: $(VENV)/wheel/ready kernel-env  ## the smaller suite on several versions of vLLM and both its runners; writes the table in plugins/kvoffload_vllm/README.md
	@$(PYTHON) tests/vllm_stock/install.py --versions all $(VLLM_ENV_ARGS)
	HYPOTHESIS_PROFILE=ci $(AGAINST_WHEEL) $(VLLM) -m tests.vllm_versions.matrix $(VERSIONS_ARGS)

check: lint types imports size test  ## all that a change must pass

lint: venv  ## form and lint rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: venv  ## mypy, strict for the packages
	$(BIN)/mypy

imports: venv  ## the layers: imports point down only
	$(BIN)/lint-imports --no-cache

size: venv  ## warn of files over 400 lines and functions over 40
	$(BIN)/python .ci/size.py $(PACKAGES)

format: venv  ## rewrite the sources in the agreed form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

kernel-env: venv  ## Triton in .venv/triton (200 MB) for the tests of the page kernel, which need no GPU
	@test -d $(VENV)/triton || $(PIP) install --no-deps --target $(VENV)/triton triton==3.9.0

tools:  ## install the distribution packages that some tests use (root on Debian), or name them
	@.ci/tools

bench-hooks: venv vllm-env  ## time in the scheduler's hooks on a stock vLLM, beside its own connector
	PYTHONPATH=$(CURDIR) $(VLLM) -m kvoffload.cli bench hooks --peer tests.vllm_stock.peer $(ARGS)

bench-queue: venv vllm-env  ## the same while 10,000 requests wait, beside vLLM's OffloadingConnector
	PYTHONPATH=$(CURDIR) $(VLLM) -m kvoffload.cli bench queue $(ARGS)

bench-serve: venv vllm-env  ## throughput and first tokens of a stock vLLM with offloading, beside its own connector
	PYTHONPATH=$(CURDIR) $(VLLM) -m kvoffload.cli bench serve --peer tests.vllm_stock.peer $(ARGS)

docs: venv  ## write the generated tables of metrics and benches anew
	$(BIN)/python .ci/readme.py

lock: venv  ## write .ci/requirements.lock anew from pyproject.toml
	$(BIN)/python .ci/lock.py
	@$(MAKE) --no-print-directory venv

dashboards: venv  ## write the dashboards and the runbook anew from what generates them
	@$(BIN)/python -m dashboards.generate

site: venv  ## build the documentation into .venv/site; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . $(VENV)/site
	@echo "$(VENV)/site/index.html"

grafana: venv  ## Prometheus and Grafana in containers, a demo for them to watch, and the address
	docker compose -f dashboards/compose.yml up --detach --wait
	@echo "Open http://127.0.0.1:3000; Ctrl-C ends the demo. \`docker compose -f dashboards/compose.yml down\` ends the rest."
	$(BIN)/kvoffload demo --serve-metrics 9464 --serve-for 3600 $(ARGS)

screenshot: venv  ## take the pictures of dashboards and report anew, in a real browser (ARGS="boards" or "report")
	@$(BIN)/python -m dashboards.pictures $(ARGS)

observe: venv  ## a demo under a real Prometheus: every query of every panel and rule (ARGS="HOST:PORT" adds engines)
	@$(BIN)/python -m dashboards.observe $(ARGS)

simulate: venv  ## ten thousand seeded lives of an engine on a virtual clock with copies that misbehave (ARGS="--seed N": one)
	@$(BIN)/python -m tests.simulate $(ARGS)

deep: $(VENV)/wheel/ready  ## the property tests with many more examples; takes long
	HYPOTHESIS_PROFILE=deep $(AGAINST_WHEEL) $(BIN)/pytest -m "hypothesis and not gpu and not vllm" --timeout 3600 $(ARGS)

soak: venv vllm-env  ## an hour of mixed traffic in virtual time, then ten minutes on a stock vLLM: nothing may grow (ARGS="--vllm-minutes N")
	@$(BIN)/python -m tests.soak $(ARGS)

explore: venv  ## every interleaving of small worlds, over a million states; takes long (ARGS="--states N WORLD...")
	@$(BIN)/python -m tests.explore $(ARGS)

mutants: venv  ## break one line at a time and see that a test notices (ARGS="--rule N")
	@$(BIN)/python -m tests.mutants $(ARGS)

coverage: venv  ## branch coverage of the quick tests; core, model and bus must be complete
	HYPOTHESIS_PROFILE=ci $(BIN)/coverage run -m pytest -m "$(FAST_MARKS)" -q $(ARGS)
	$(BIN)/coverage report --include='kvoffload/core/*,kvoffload/model/*,kvoffload/bus/*' --fail-under=100
	$(BIN)/coverage report --fail-under=$(COVERAGE_FLOOR)

wheel: $(VENV)/wheel/ready  ## build the wheel into .venv/dist and unpack it for the tests
	@:

clean:  ## remove .venv and every cache
	rm -rf $(VENV) dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

COVERAGE_FLOOR ?= 80

$(VENV)/ready: .ci/requirements.lock pyproject.toml
	@test -x $(BIN)/pip || $(NEW_ENOUGH)
	@test -x $(BIN)/pip || { echo "Setting up $(VENV) (minutes the first time)"; $(PYTHON) -m venv $(VENV); }
	$(PIP) install -r .ci/requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# What the pure layers and their tests need, in the locked versions.
$(QUICK)/ready: .ci/requirements.lock
	@test -x $(QUICK)/bin/pip || $(NEW_ENOUGH)
	@test -x $(QUICK)/bin/pip || $(PYTHON) -m venv $(QUICK)
	@$(QUICK)/bin/python -m pip --disable-pip-version-check -qq install --constraint .ci/requirements.lock anyio hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

$(VENV)/wheel/ready: $(VENV)/ready $(SOURCES)
	@rm -rf $(VENV)/dist $(VENV)/wheel
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/dist .
	$(PIP) install --no-deps --no-index --target $(VENV)/wheel $(VENV)/dist/*.whl
	@touch $@
