# Needs Python >= 3.11 and a package index; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
REAL_TESTS ?= tests/real
# What talks to each dependency.
LOWEST_TESTS ?= $(addprefix tests/,queue/test_queue.py queue/test_wire.py queue/test_connection.py \
	fleet/test_metrics.py fleet/test_scaler_kubernetes.py gateway/test_keys.py gateway/test_v1.py \
	campaigns/test_rows_kinds.py campaigns/test_rq_queue.py trainers/test_mcp_server.py \
	lean/goals/test_recipes.py commands/test_numbers.py commands/test_watch.py)
BIN := $(VENV)/bin
# Bytecode is kept, whatever the caller's shell says: each of hundreds of processes would compile its own.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-slow test-forks test-documents test-user real-test servers-test lowest-test pythons-test image-test k8s-test slurm-test ray-test otel-test fuzz-gateway attack-gateway test-trainers docs lint format types bench bench-quick figures bench-submit bench-lean bench-judge bench-library bench-layers bench-gateway bench-scale bench-replay soak simulate soak-long soak-cluster soak-clusters soak-lean soak-walls soak-campaign soak-traces soak-judge soak-fork find-faults mutants sim sim-quick dist release clean help

help:            ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/'

demo: $(VENV)/local   ## check the examples with real Lean, through a real queue
	$(BIN)/leanq submit examples/*.lean || test $$? -eq 1
	@echo "Next: $(BIN)/leanq submit YOUR.lean, or $(BIN)/leanq up and the Python of README.md"

test: $(VENV)/dev     ## the tests but the slow ones; two minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" --hypothesis-profile=quick

test-all: test test-slow test-forks test-documents ## all tests but real-test's, and those of the lean driver once more in forks and by Lean's language server; half an hour

test-slow: $(VENV)/dev ## the slow tests, and all properties at full length; twenty minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal --ignore=tests/real -m "slow or hypothesis"

test-forks: $(VENV)/dev ## the tests of the lean driver, each text in a fork
	$(BIN)/python -m pytest -n 3 --dist worksteal --forks tests/lean/test_*.py tests/lean/goals/test_holes.py tests/lean/goals/test_steps.py

test-documents: $(VENV)/dev ## what reads texts the most, each by Lean's language server; three minutes
	$(BIN)/python -m pytest -n 3 --dist worksteal --documents $(addprefix tests/lean/test_,lean_driver.py examples.py verify.py hostile.py)

test-user: $(VENV)/dev ## the sandbox and the fork server as another user than root; a minute
	tests/engines/another-user $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow" -p no:cacheprovider --hypothesis-profile=quick tests/lean/sandbox $(addprefix tests/lean/run/test_,evaluations.py fork_server.py fork_walls.py hot_headers.py shared_forks.py shared_text.py stripped.py) tests/lean/goals/test_standing.py

real-test: $(VENV)/dev ## the lean driver on a full library, LEANQ_TEST_LIBRARY's or one that is built; an hour or more
	PYTHONPATH=.:tests $(BIN)/python -m support.lean.libraries || test "$$CI" != true
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(REAL_TESTS)

lint: $(VENV)/dev     ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/dev   ## let ruff rewrite
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(VENV)/dev    ## mypy, strict
	$(BIN)/mypy

docs: $(VENV)/dev     ## the site of docs/ and the API pages, in build/site; warnings are errors
	$(BIN)/python -m mkdocs build --strict --quiet

bench: $(VENV)/dev    ## leanq beside seven other queues, in a quarter of an hour at most
	$(BIN)/python bench/compare.py --environments $(VENV)/peers

bench-quick: $(VENV)/dev   ## what leanq's queue costs, in a line of JSON; a minute at most
	@$(BIN)/python bench/quick.py

figures: $(VENV)/dev       ## README's figures once more, and which have moved by more than a quarter
	$(BIN)/python bench/figures.py

bench-submit: $(VENV)/dev   ## what leanq adds to Lean: overhead, audit, idle CPU
	$(BIN)/python bench/submit.py

bench-lean: $(VENV)/dev     ## throughput and latency of checks beside plain Lean; what a fork costs behind 1,500 modules
	$(BIN)/python bench/lean.py
	$(BIN)/python bench/lean.py --judge
	$(BIN)/python bench/lean.py --judge --statements 1
	$(BIN)/python bench/forks.py --modules 1500 --keep build

bench-judge: $(VENV)/dev    ## what the judge costs beside the check that it follows; ten minutes
	$(BIN)/python bench/judge.py --large

bench-library: $(VENV)/dev  ## the judge over every module of a full library, and what headers cost; half an hour
	$(BIN)/python bench/library.py

bench-layers: $(VENV)/dev   ## ways not to elaborate again, on a toolchain with Std and Lean: LEANQ_LEAN=PATH
	$(BIN)/python bench/layers.py
	$(BIN)/python bench/routing.py

bench-gateway: $(VENV)/dev  ## the HTTP gateway beside an empty endpoint and a direct client; needs wrk; five minutes
	$(BIN)/python bench/gateway.py

bench-scale: $(VENV)/dev    ## growth, memory, idle fleets and scale on paper, on one server and on three nodes; fifteen minutes
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/scale.py --nodes 3

bench-replay: $(VENV)/dev  ## a replay memory's samples, reading and writing, by its size; ten minutes
	$(BIN)/python bench/replay.py

servers-test: $(VENV)/dev ## the queue's tests on each server of docs/operations/servers.md, as root on Debian; an hour
	PYTHONPATH=.:tests $(BIN)/python -m engines.servers $(SERVERS_TEST_OPTIONS)

lowest-test: build/lowest/ready ## fast tests with the lowest releases that pyproject.toml allows; two minutes
	build/lowest/bin/python -m pytest -n 3 --dist worksteal -m "not slow" --hypothesis-profile=quick $(LOWEST_TESTS)

build/lowest/ready: pyproject.toml
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=build/lowest build/lowest/bin/uv pip install --quiet --resolution lowest-direct -e '.[local,k8s,campaigns,server,otel]'
	VIRTUAL_ENV=build/lowest build/lowest/bin/uv pip install --quiet -e '.[dev]'
	touch $@

pythons-test: ## make test on Debian's Pythons as root on Debian, on its 3.11.2 as an ordinary user; an hour
	tests/engines/in-debian bookworm "tests/engines/as-user 'make demo test'"
	tests/engines/in-debian trixie 'make test'
	tests/engines/in-debian sid 'make test'

image-test: $(VENV)/dev ## the image and compose.yaml on podman and Docker, as root on Debian; ten minutes
	PYTHONPATH=.:tests $(BIN)/python -m engines.image $(IMAGE_TEST_OPTIONS)

k8s-test: $(VENV)/dev   ## the overlays on a real API server, which is built, or by dry runs on KUBECONFIG's
	PYTHONPATH=.:tests $(BIN)/python -m engines.cluster $(K8S_TEST_OPTIONS)

slurm-test: $(VENV)/dev ## a fleet on a real Slurm cluster of this machine, as root on Debian; seven minutes
	PYTHONPATH=.:tests $(BIN)/python -m engines.slurm

ray-test: $(VENV)/local ## a fleet on a real Ray cluster of this machine; 300 MB, five minutes
	test -x build/ray/bin/python || $(PYTHON) -m venv build/ray
	build/ray/bin/pip install --quiet --disable-pip-version-check -e '.[local]' 'ray>=2.60,<2.61'
	PYTHONPATH=.:tests build/ray/bin/python -m engines.ray

otel-test: $(VENV)/dev  ## traces in a real receiver, Phoenix; 1 GB, five minutes
	test -x build/phoenix/bin/phoenix || $(PYTHON) -m venv build/phoenix
	build/phoenix/bin/pip install --quiet --disable-pip-version-check 'arize-phoenix>=20,<21'
	LEANQ_PHOENIX=$(CURDIR)/build/phoenix/bin/phoenix $(BIN)/python -m pytest tests/fleet/test_tracing.py

fuzz-gateway: $(VENV)/dev ## 10,000 hostile requests to the HTTP gateway, by Schemathesis; fifteen minutes at most
	test -x build/schemathesis/bin/schemathesis || $(PYTHON) -m venv build/schemathesis
	build/schemathesis/bin/pip install --quiet --disable-pip-version-check 'schemathesis>=4.32,<5'
	PYTHONPATH=.:tests $(BIN)/python -m engines.fuzz --schemathesis build/schemathesis/bin/schemathesis

attack-gateway: $(VENV)/dev ## six minutes of attacks on an HTTP gateway, directly and through Caddy
	PYTHONPATH=.:tests $(BIN)/python -m engines.attack

test-trainers: $(VENV)/dev  ## the adapters beside the trainers' real libraries; two gigabytes, ten minutes
	PYTHONPATH=.:tests $(BIN)/python -m adapters.trainers --environments $(VENV)/trainers $(TEST_TRAINERS_OPTIONS)

soak: $(VENV)/dev     ## ten minutes of kills, cuts, restarts and failovers, and what was lost
	PYTHONPATH=.:tests $(BIN)/python -m soak.soak

soak-long: $(VENV)/dev ## 1,000,000 requests in an hour, 2,500 kills
	PYTHONPATH=.:tests $(BIN)/python -m soak.soak --requests 1000000 --kills 2500 --seconds 3600

soak-cluster: $(VENV)/dev ## five minutes on three nodes whose slots move while workers and nodes die
	PYTHONPATH=.:tests $(BIN)/python -m soak.cluster_soak

soak-clusters: $(VENV)/dev ## five minutes of the same between two servers, whose weights change all the time
	PYTHONPATH=.:tests $(BIN)/python -m soak.soak --clusters 2 --workers 4 --requests 60000 --kills 150 --seconds 300

soak-lean: $(VENV)/dev ## the same with theorems for real Lean, in forks and by Lean's language server, five minutes each
	PYTHONPATH=.:tests $(BIN)/python -m soak.soak --driver lean --workers 3 --slots 2 --lease 4 --requests 3000 --kills 30 --seconds 300
	PYTHONPATH=.:tests $(BIN)/python -m soak.soak --driver server --workers 3 --slots 2 --lease 4 --requests 600 --kills 30 --seconds 300

simulate: $(VENV)/dev ## the whole queue in simulated time, on the real scripts, for four minutes; OPTIONS=--help
	@PYTHONPATH=.:tests $(BIN)/python -m simulation $(OPTIONS)

soak-walls: $(VENV)/dev ## 2,000 hostile runs beside 2,000 innocent ones, and what they left behind
	PYTHONPATH=.:tests $(BIN)/python -m soak.walls_soak

soak-campaign: $(VENV)/dev  ## 5,000 rows of real Lean, while coordinators, workers and the server are killed
	PYTHONPATH=.:tests $(BIN)/python -m soak.campaign_soak

soak-traces: $(VENV)/dev    ## 2,000 problems by 4 samples of real Lean, exported as traces, and their rows checked again
	PYTHONPATH=.:tests $(BIN)/python -m soak.traces_soak

soak-judge: $(VENV)/dev  ## 10,000 damaged and forged compiled files, and why any of them is accepted
	PYTHONPATH=.:tests $(BIN)/python -m soak.judge_soak

soak-fork: $(VENV)/dev  ## 20,000 checks behind a preloaded header, among kills, crashes and attacks
	PYTHONPATH=.:tests $(BIN)/python -m soak.fork_soak

find-faults: $(VENV)/dev  ## one hidden fault after another in a small fleet, and what shows it; LEAN=bin/lean, FAULTS=flood
	PYTHONPATH=.:tests $(BIN)/python -m soak.hidden_faults --lean $(LEAN) $(FAULTS)

mutants: $(VENV)/dev  ## 200 planted bugs, and which tests notice them, for an hour and a half at most; MUTANTS_OPTIONS="--bugs 20 --seed 7"
	@PYTHONPATH=.:tests $(BIN)/python -m engines.mutants $(MUTANTS_OPTIONS)

sim: $(VENV)/dev      ## the scaler in simulated fleets, 30 seeds; half an hour at most
	$(BIN)/python -m sim

sim-quick: $(VENV)/dev   ## the same with 5 seeds, tables only; five minutes at most
	@$(BIN)/python -m sim --quick

dist: $(VENV)/dev     ## sdist and wheel
	$(BIN)/python -m build

release: $(VENV)/dev  ## the same, tried on each Python of this machine; VERSION=X.Y.Z writes the changelog's section
	$(BIN)/python deploy/release.py --version "$(VERSION)"

clean:           ## remove what the targets made
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip looks for a version that fits for minutes before it says that there is none.
$(VENV)/local: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leanq needs Python 3.11 or newer, and $(PYTHON) is %s; name another: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[local]'
	@touch $@

$(VENV)/dev: pyproject.toml $(VENV)/local
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
