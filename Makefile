# make demo | demo-mooncake | serve | test | check | chaos: each sets .venv up first, which is quick the
# second time.
.PHONY: demo demo-mooncake serve test check chaos setup

demo: setup
	@.venv/bin/python -m kvrecall.demo $(DEMO)

demo-mooncake: setup
	@.venv/bin/python -m kvrecall.demo mooncake $(DEMO)

serve: setup
	@.venv/bin/python -m kvrecall.demo serve $(SERVE)

test: setup
	@.venv/bin/python -m pytest $(TESTS)

check: setup
	@scripts/check

chaos: setup
	@.venv/bin/python -m kvrecall.chaos --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(CHAOS)

setup:
	@scripts/setup
