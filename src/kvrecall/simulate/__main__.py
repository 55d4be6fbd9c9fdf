"""``python -m kvrecall.simulate``."""

from kvrecall.simulate.cli import app

app(prog_name="kvrecall simulate")
