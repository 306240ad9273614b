# Everything a developer does here. `make` alone prints the targets, the everyday ones first.
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
SGLANG := $(VENV)/sglang/bin/python
NEW_ENOUGH := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvoffload needs Python 3.11 or newer; name one with PYTHON=")'
OTHER_PYTHONS := 3.12 3.13 3.14
FAST_MARKS := not slow and not full and not gpu and not vllm and not sglang
# A file's tests stay on one worker, so that what a file starts for all of them is started once.
WORKERS := -n 2 --dist loadfile
SOURCES := $(shell find $(PACKAGES) dashboards/grafana/dashboards dashboards/rules dashboards/RUNBOOK.md -not -path '*__pycache__*' 2>/dev/null)

# The wheel is found before the editable install; safe path keeps the working directory out of `python -m` and `-c`,
# also in the processes that tests start.
PROFILE := ci
WHEEL := $(CURDIR)/$(VENV)/wheel
AGAINST_WHEEL = HYPOTHESIS_PROFILE=$(PROFILE) KVOFFLOAD_WHEEL=$(WHEEL) PYTHONPATH=$(WHEEL) PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
WITHOUT_VLLM = env $(AGAINST_WHEEL) $(BIN)/pytest $(WORKERS)
WITH_VLLM = env $(AGAINST_WHEEL) $(VLLM) -m pytest $(WORKERS)
# One worker, so that one server serves all.
WITH_SGLANG = env $(AGAINST_WHEEL) SGLANG_USE_CPU_ENGINE=1 $(SGLANG) -m pytest
VLLM_TESTS := tests/vllm --ignore=tests/vllm/versions
BENCH = OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.bench
VLLM_BENCH = VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$(CURDIR) $(VLLM) -m tests.bench
# Our tier below vLLM's own connector is for vLLM 0.33 and newer.
TIERS_BENCH = VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$(CURDIR)/$(VENV)/vllm-overlays/0.33.0:$(CURDIR) $(VLLM) -m tests.bench
ON_SGLANG = PYTHONPATH=$(CURDIR):$(CURDIR)/plugins $(SGLANG)
VERSIONS = env $(AGAINST_WHEEL) $(VLLM) -m tests.vllm.versions.matrix

.DEFAULT_GOAL := help
.PHONY: help demo test check quick test-fast format test-vllm test-sglang test-all quick-others recurrent-matrix disk-traffic store-traffic vllm-versions lint types imports size coverage deep kills simulate explore same journeys mutants soak vllm-demo sglang-demo grafana observe bench-copy bench-disk bench-engine bench-fs bench-hicache bench-hints bench-hooks bench-instructions bench-loads bench-node bench-policies bench-queue bench-remote bench-restart bench-scale bench-serve bench-trace bench-verify bench-worker docs site dashboards screenshot release lock venv wheel vllm-env sglang-env kernel-env tools kubectl clean
.DELETE_ON_ERROR:

help:
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\nARGS="..." passes options on, such as make demo ARGS="--model tiny".\n'

##@ Every day

demo: $(if $(findstring --remote,$(ARGS)),venv,$(VENV)/demo-ready)  ## compare conversations without and with offloading
	@$(BIN)/kvoffload demo $(ARGS)

test: $(VENV)/wheel/ready vllm-env sglang-env  ## prove every promise once, in 15 minutes
	@.ci/tools || { test -z "$$CI" || exit 1; echo "Tests that need those programs are skipped."; }
	@.ci/timed "tests without vLLM" $(WITHOUT_VLLM) -m "not vllm and not sglang and not full" $(ARGS)
	@$(if $(ARGS),echo "ARGS chose tests; those on a stock engine: make test-vllm ARGS=... or test-sglang",$(MAKE) --no-print-directory test-vllm test-sglang)

check: lint types imports test  ## run all that a change must pass, as CI does

quick: $(QUICK)/ready  ## test core, bus and model on the sources, in seconds
	HYPOTHESIS_PROFILE=fast PYTHONPATH=$(CURDIR) PYTHONDONTWRITEBYTECODE=1 $(QUICK)/bin/python -m pytest -m "$(FAST_MARKS)" -q $(or $(ARGS),tests/core tests/bus tests/model)

test-fast: PROFILE := fast
test-fast: $(VENV)/wheel/ready  ## run the quick tests on the built wheel, in a minute
	$(AGAINST_WHEEL) $(BIN)/pytest -m "$(FAST_MARKS)" $(ARGS)

format: venv  ## rewrite the sources in the agreed form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

##@ Test

test-vllm: $(VENV)/wheel/ready vllm-env kernel-env  ## run the part of make test that needs a stock vLLM
	@$(if $(ARGS),,.ci/timed "one start of each vLLM" $(VERSIONS) --starts)
	@.ci/timed "tests on vLLM" $(WITH_VLLM) -m "vllm and not full" $(or $(ARGS),$(VLLM_TESTS))

test-sglang: $(VENV)/wheel/ready sglang-env  ## run the part of make test that needs a stock SGLang
	@.ci/timed "tests on SGLang" $(WITH_SGLANG) -m "sglang and not full" $(or $(ARGS),tests/sglang)

test-all: PROFILE := full
test-all: $(VENV)/wheel/ready vllm-env sglang-env quick-others size kubectl  ## run every test that this machine can run
	@.ci/tools || { test -z "$$CI" || exit 1; echo "Tests that need those programs are skipped."; }
	@.ci/timed "all tests without vLLM" $(WITHOUT_VLLM) -m "not vllm and not sglang" $(ARGS)
	@$(if $(ARGS),,.ci/timed "versions of vLLM" $(VERSIONS) --check)
	@$(if $(ARGS),,.ci/timed "all tests on vLLM" $(WITH_VLLM) -m vllm $(VLLM_TESTS))
	@$(if $(ARGS),,.ci/timed "all tests on SGLang" $(WITH_SGLANG) -m sglang tests/sglang)

quick-others:  ## run make quick with other Pythons, where they exist
	@for version in $(OTHER_PYTHONS); do \
	    if python=$$(.ci/python $$version); then \
	        echo "Python $$version"; \
	        $(MAKE) --no-print-directory quick QUICK=$(VENV)/quick-$$version PYTHON=$$python || exit 1; \
	    else echo "Python $$version is not here: its tests are skipped"; fi; \
	done

recurrent-matrix: $(VENV)/wheel/ready vllm-env  ## test recurrent models in every setting
	$(AGAINST_WHEEL) $(VLLM) -m tests.vllm.recurrent_matrix $(ARGS)

disk-traffic: $(VENV)/wheel/ready vllm-env  ## mix traffic on vLLMs with a disk, two ranks too (long)
	$(AGAINST_WHEEL) $(VLLM) -m tests.vllm.disk_traffic $(ARGS)

store-traffic: $(VENV)/wheel/ready vllm-env  ## mix traffic on two vLLMs that share a store (long)
	$(AGAINST_WHEEL) $(VLLM) -m tests.vllm.store_traffic $(ARGS)

vllm-versions: $(VENV)/wheel/ready vllm-env kernel-env  ## run a smaller suite on several versions of vLLM
	$(VERSIONS) $(VERSIONS_ARGS)

lint: venv  ## check form and lint rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/python .ci/words.py

types: venv  ## check types with mypy
	$(BIN)/mypy

imports: venv  ## check that imports point down the layers
	$(BIN)/lint-imports --no-cache

size: venv  ## warn of long files and functions
	$(BIN)/python .ci/size.py $(PACKAGES)

coverage: venv  ## measure branch coverage of the quick tests
	HYPOTHESIS_PROFILE=$(PROFILE) $(BIN)/coverage run -m pytest -m "$(FAST_MARKS)" -q $(ARGS)
	$(BIN)/coverage report --include='kvoffload/core/*,kvoffload/model/*,kvoffload/bus/*' --fail-under=100
	$(BIN)/coverage report --fail-under=$(COVERAGE_FLOOR)

deep: PROFILE := deep
deep: $(VENV)/wheel/ready  ## run property tests and kills many more times (long)
	$(AGAINST_WHEEL) $(BIN)/pytest -m "hypothesis and not gpu and not vllm" --timeout 3600 $(ARGS)
	$(if $(ARGS),,KVOFFLOAD_COMMAND_KILLS=440 $(BIN)/pytest -q tests/kills)

kills: $(VENV)/wheel/ready  ## end engines with a disk or host files 440 times (long)
	KVOFFLOAD_KILLS=200 KVOFFLOAD_ENGINE_KILLS=20 $(AGAINST_WHEEL) $(BIN)/pytest -q tests/reference/test_kills.py tests/reference/test_neighbour_processes.py $(ARGS)

simulate: venv  ## play 10,000 seeded lives of engines (ARGS="--seed N")
	@$(BIN)/python -m tests.simulate $(ARGS)

explore: venv  ## try every interleaving of small worlds (long)
	@$(BIN)/python -m tests.explore $(ARGS)

same: venv  ## compare what a restructuring must not change
	@$(BIN)/python -m tests.same $(ARGS)

journeys: venv  ## count functions in the way of a store and a load
	@PYTHONPATH=$(CURDIR):$(CURDIR)/plugins $(BIN)/python -m tests.same.journeys $(ARGS)

mutants: venv  ## change 1,500 lines; which test notices each? (long)
	@$(BIN)/python -m tests.mutants $(ARGS)

soak: venv vllm-env  ## run an hour of traffic; nothing may grow (long)
	@$(BIN)/python -m tests.soak $(ARGS)

##@ Try and measure

vllm-demo: vllm-env  ## compare a stock vllm serve without and with kvoffload
	@$(VLLM) tests/vllm/stock/demo.py $(ARGS)

sglang-demo: sglang-env  ## kill a stock SGLang without and with kvoffload
	@$(ON_SGLANG) tests/sglang/stock/demo.py $(ARGS)

grafana: venv  ## start Prometheus and Grafana in containers, and a demo
	docker compose -f dashboards/compose.yml up --detach --wait
	@echo "Open http://127.0.0.1:3000; Ctrl-C ends the demo. \`docker compose -f dashboards/compose.yml down\` ends the rest."
	$(BIN)/kvoffload demo --serve-metrics 9464 --serve-for 3600 $(ARGS)

observe: venv  ## ask every query of the dashboards of a Prometheus
	@$(BIN)/python -m dashboards.observe $(ARGS)

bench-copy: venv  ## time scattered host copies beside one large copy
	@$(BENCH) copy $(ARGS)

bench-disk: venv  ## time the disk tier beside its disk, and a restart
	@$(BENCH) disk $(ARGS)

bench-engine: venv  ## time the reference engine with and without offloading
	@$(BENCH) engine $(ARGS)

bench-fs: venv vllm-env  ## time prompts after a restart beside vLLM's fs tier
	@$(TIERS_BENCH) fs $(ARGS)

bench-hicache: sglang-env  ## the same beside SGLang's file backend
	@$(ON_SGLANG) -m tests.bench hicache $(ARGS)

bench-hints: venv  ## count hits when clients say which sessions have ended
	@$(BENCH) hints $(ARGS)

bench-hooks: venv vllm-env  ## time the scheduler's hooks beside vLLM's connector
	@$(VLLM_BENCH) hooks $(ARGS)

bench-instructions: venv  ## count instructions in hooks beside another build
	@$(BENCH) instructions $(ARGS)

bench-loads: venv vllm-env  ## time first tokens of always, never and measured loads
	@PYTHONPATH=$(CURDIR):$(CURDIR)/plugins $(if $(findstring --vllm,$(ARGS)),$(VLLM_BENCH),$(BENCH)) loads $(ARGS)

bench-node: venv  ## time copies from another engine's memory
	@$(BENCH) node $(ARGS)

bench-queue: venv vllm-env  ## the same while 10,000 requests wait
	@$(VLLM_BENCH) queue $(ARGS)

bench-remote: venv  ## time the remote tier, and a store that hangs
	@$(BENCH) remote $(ARGS)

bench-restart: venv vllm-env  ## time a vllm serve that is killed and starts again
	@$(VLLM_BENCH) restart $(ARGS)

bench-scale: venv  ## time lookups and measure memory of many slots
	@$(BENCH) scale $(ARGS)

bench-serve: venv vllm-env  ## measure throughput of vLLM with offloading
	@$(VLLM_BENCH) serve $(ARGS)

bench-policies: venv  ## count hits of each store policy, by the host's size
	@PYTHONPATH=$(CURDIR):$(CURDIR)/plugins $(BENCH) policies $(ARGS)

bench-trace: venv  ## count hits of a production trace by tier
	@$(BENCH) trace $(ARGS)

bench-verify: venv  ## time copies with checksums
	@$(BENCH) verify $(ARGS)

bench-worker: venv  ## time what copies cost a worker beside another build
	@$(BENCH) worker $(ARGS)

##@ Generate

docs: venv  ## write the generated tables
	$(BIN)/python .ci/readme.py

site: venv  ## build the documentation into .venv/site
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . $(VENV)/site
	@echo "$(VENV)/site/index.html"

dashboards: venv  ## write the dashboards and the runbook
	@$(BIN)/python -m dashboards.generate

screenshot: venv $(if $(ARGS),,vllm-env)  ## take the documents' picture of two vLLM engines
	@.ci/tools || true
	@$(BIN)/python -m dashboards.pictures $(ARGS)

release: venv  ## build sdist, wheel and bill of materials into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python .ci/sbom.py > dist/kvoffload.cdx.json
	cd dist && sha256sum * > SHA256SUMS

lock: venv  ## resolve .ci/requirements.lock from pyproject.toml
	$(BIN)/python .ci/lock.py
	@$(MAKE) --no-print-directory venv

##@ Environments

venv: $(VENV)/ready  ## set up .venv with the locked versions
	@:

wheel: $(VENV)/wheel/ready  ## build the wheel into .venv/dist
	@:

vllm-env:  ## set up a stock vLLM in .venv/vllm
	@$(PYTHON) tests/vllm/stock/install.py --versions all $(VLLM_ENV_ARGS)

sglang-env: vllm-env kernel-env  ## set up a stock SGLang in .venv/sglang
	@$(PYTHON) tests/sglang/stock/install.py

kernel-env: venv  ## set up Triton in .venv/triton (1 GB)
	@test -d $(VENV)/triton || $(PIP) install --no-deps --target $(VENV)/triton triton==3.9.0

tools:  ## install the system packages that some tests use
	@.ci/tools || true

kubectl: venv  ## install kubectl, which renders the files for clusters
	@.ci/kubectl || test -z "$$CI"

clean:  ## remove .venv and every cache
	rm -rf $(VENV) dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

COVERAGE_FLOOR ?= 80

# The package with its dependencies is all that the demo needs; `make venv` adds what development needs.
$(VENV)/demo-ready: .ci/requirements.lock pyproject.toml
	@test -x $(BIN)/pip || $(NEW_ENOUGH)
	@test -x $(BIN)/pip || { echo "Setting up $(VENV) (a minute the first time)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) install --constraint .ci/requirements.lock hatchling
	@$(PIP) install --constraint .ci/requirements.lock --no-build-isolation --editable .
	@touch $@

$(VENV)/ready: $(VENV)/demo-ready
	$(PIP) install -r .ci/requirements.lock
	@touch $@

# What the pure layers and their tests need, in the locked versions.
$(QUICK)/ready: .ci/requirements.lock
	@test -x $(QUICK)/bin/pip || $(NEW_ENOUGH)
	@test -x $(QUICK)/bin/pip || $(PYTHON) -m venv $(QUICK)
	@$(QUICK)/bin/python -m pip --disable-pip-version-check -qq install --constraint .ci/requirements.lock anyio hypothesis msgspec pytest pytest-asyncio pytest-timeout
	@touch $@

$(VENV)/wheel/ready: $(VENV)/ready $(SOURCES)
	@rm -rf $(VENV)/dist $(VENV)/wheel
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/dist .
	$(PIP) install --no-deps --no-index --target $(VENV)/wheel $(VENV)/dist/*.whl
	@touch $@
