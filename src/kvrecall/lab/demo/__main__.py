"""``python -m kvrecall.lab.demo``: ``kvrecall demo``."""

from __future__ import annotations

from kvrecall.lab.demo.cli import app

if __name__ == "__main__":
    app(prog_name="python -m kvrecall.lab.demo")
