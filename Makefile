# make demo | serve | test | check: each sets .venv up first, which is quick the second time.
.PHONY: demo serve test check setup

demo: setup
	@.venv/bin/python -m kvrecall.demo $(DEMO)

serve: setup
	@.venv/bin/python -m kvrecall.demo serve $(SERVE)

test: setup
	@.venv/bin/python -m pytest $(TESTS)

check: setup
	@scripts/check

setup:
	@scripts/setup
