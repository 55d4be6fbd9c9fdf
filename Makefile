# make demo | demo-mooncake | serve | test | check | chaos | identity | bench | gpu-check: each sets
# .venv up first, which is quick the second time.
.PHONY: demo demo-mooncake serve test check chaos identity bench gpu-check setup

demo: setup
	@.venv/bin/python -m kvrecall.lab.demo $(DEMO)

demo-mooncake: setup
	@.venv/bin/python -m kvrecall.lab.demo mooncake $(DEMO)

serve: setup
	@.venv/bin/python -m kvrecall.lab.demo serve $(SERVE)

# Two at a time, file by file: starting an engine keeps one core busy. WORKERS= : one after the other.
# TESTS='-m long' : those that are left out, as they take minutes.
WORKERS ?= -n 2 --dist loadfile
test: setup
	@.venv/bin/python -m pytest $(WORKERS) $(TESTS)

check: setup
	@scripts/check

chaos: setup
	@.venv/bin/python -m kvrecall.lab.chaos --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(CHAOS)

# Pairs of engines that differ in one thing, on one pool: half an hour. IDENTITY="--list": which.
identity: setup
	@.venv/bin/python -m kvrecall.lab.identity $(IDENTITY)

# All benchmarks with their peers, then plots and tables. QUICK=1: small, and published nowhere.
bench: setup
	@scripts/bench $(if $(QUICK),--quick) $(BENCH)

gpu-check: setup
	@.venv/bin/kvrecall gpu-check $(GPU_CHECK)

setup:
	@scripts/setup
