"""``python -m kvrecall.demo``: ``kvrecall demo``."""

from __future__ import annotations

from kvrecall.demo.cli import app

if __name__ == "__main__":
    app(prog_name="python -m kvrecall.demo")
