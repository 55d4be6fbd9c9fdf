# Every target makes .venv ready first, as far as it needs it: some three minutes the first time,
# then at once. `make setup` makes it ready for all of them.
#
#   make demo            a server, a conversation, and what was recalled
#   make demo-mooncake   two servers that share blocks by Mooncake
#   make serve           a server of a small model on port 8000
#   make test            what a change must pass: each promise and main path, with real engines
#                        TESTS='-k disk' some of them; WORKERS= one file after the other
#   make test-lab        the laboratory's and the documents' tests
#   make test-all        all tests, those too that start many engines: most of an hour
#   make coverage        which branches of pool and connector no test takes: COVERAGE=--report the table alone
#   make check           lint, format, strict types, import directions, then make test's tests
#   make chaos           a server under faults: SECONDS=120 SEED=n
#   make identity        pairs of engines that differ in one thing, on one pool: 45 minutes
#   make hostile         attacks on all that listens, reads or prints: HOSTILE=--no-engines a part
#   make models          models of every shape, recalled from every tier: twenty minutes
#   make compat          connector, servers and retrieval with each supported version of vLLM
#   make faults          the pool on a simulated machine whose power, disk and clock fail: SEEDS=10000 SEED=n
#   make streams         copies in random orders of a simulated device: SCHEDULES=5000
#   make mutants         planted faults that tests must find: MUTANTS="--only slab-no-fdatasync" one
#   make bench           all benchmarks with their peers, and the pages that show them; QUICK=1 small, unpublished
#   make docs            the generated pages, and the site in build/site
#   make gpu-check       retrieval and copies on this machine's GPU
.PHONY: demo demo-mooncake serve test test-lab test-all coverage check chaos faults hostile identity models compat streams \
  mutants bench docs gpu-check \
  setup setup-engine setup-mooncake setup-bench

demo: setup-engine
	@.venv/bin/python -m kvrecall demo $(DEMO)

demo-mooncake: setup-mooncake
	@.venv/bin/python -m kvrecall demo mooncake $(DEMO)

serve: setup-engine
	@.venv/bin/python -m kvrecall demo serve $(SERVE)

# Two files at a time: starting an engine keeps one core busy.
WORKERS ?= -n 2
test: setup
	@.venv/bin/python -m pytest $(WORKERS) $(TESTS)

test-lab: setup
	@.venv/bin/python -m pytest $(WORKERS) $(or $(TESTS),lab/tests)

test-all: setup
	@.venv/bin/python -m pytest $(WORKERS) -m '' $(or $(TESTS),tests lab/tests)

coverage: setup
	@scripts/coverage $(COVERAGE)

check: setup
	@scripts/check

chaos: setup-engine
	@.venv/bin/python -m kvrecall_lab.chaos --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(CHAOS)

# FAULTS=--mutants: what is planted in the pool, and must be found.
faults: setup
	@.venv/bin/python -m kvrecall_lab.faults --seeds $(or $(SEEDS),1000) $(if $(SEED),--seed $(SEED)) $(FAULTS)

hostile: setup
	@.venv/bin/python -m kvrecall_lab.hostile $(HOSTILE)

# IDENTITY="--list": which.
identity: setup-engine
	@.venv/bin/python -m kvrecall_lab.identity $(IDENTITY)

# MODELS="--model gemma3 --tier disk": a part.
models: setup-mooncake
	@.venv/bin/python -m kvrecall_lab.shapes $(MODELS)

# COMPAT="--version 0.33 --part server": a part.
compat: setup
	@.venv/bin/python -m kvrecall_lab.compat $(COMPAT)

streams: setup
	@.venv/bin/python -m kvrecall_lab.streams.run --schedules $(or $(SCHEDULES),1000) $(STREAMS)

mutants: setup
	@.venv/bin/python -m kvrecall_lab.mutants $(MUTANTS)

bench: setup-bench
	@scripts/bench $(if $(QUICK),--quick) $(BENCH)

docs: setup
	@scripts/docs

gpu-check: setup-engine
	@.venv/bin/kvrecall gpu-check $(GPU_CHECK)

setup:
	@scripts/setup

setup-engine setup-mooncake setup-bench:
	@scripts/setup $(@:setup-%=%)
