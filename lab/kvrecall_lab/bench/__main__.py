"""``python -m kvrecall_lab.bench``."""

from kvrecall_lab.bench.cli import main

main()
