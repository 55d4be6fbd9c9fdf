"""What is published of a run: plots, and the tables in documents."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from kvrecall.errors import KvrecallError
from kvrecall.lab.bench.suite.plots import write_plots
from kvrecall.lab.bench.suite.tables import PLOTS, filled, names_in

PAGES = (PurePosixPath("README.md"), PurePosixPath("docs/benchmarks.md"))


def read_run(path: Path) -> dict[str, Any]:
    """A run that ``bench all`` wrote. Raises KvrecallError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise KvrecallError(f"{path}: no results of a run: {error}") from error


def publish(results: Path, root: Path) -> list[Path]:
    """Draws the plots below ``root`` and fills the tables of its pages; returns what it wrote."""
    run = read_run(results)
    written = write_plots(run, root / PLOTS)
    for page in PAGES:
        path = root / page
        text = path.read_text()
        if names_in(text):
            path.write_text(filled(text, run, page))
            written.append(path)
    return written
