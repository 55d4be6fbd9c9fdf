"""Common parts of all benchmarks: shared options, alternating timing, percentiles, a table and one
line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from kvrecall import __version__
from kvrecall.engines.vllm.compat.versions import DISTRIBUTIONS, installed_version
from kvrecall.processes.command import ProgressLines

Tokens = Annotated[int, typer.Option(min=128, help="Length of the prefix or document.")]
Times = Annotated[int, typer.Option(min=1)]
Folder = Annotated[
    Path, typer.Option(help="Folder on the file system to measure; a sub-folder is created.")
]

GIB_S = 1e9 / 2**30
"""GiB/s in one GB/s. Results (JSON) are in GB/s or bytes/s; what is shown is in GiB/s, as sizes
are."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one benchmark.

    ``columns`` and ``rows`` are the table, ``notes`` are printed below it; the line of JSON has
    all of them, the ``figures`` and the facts of the machine.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: Mapping[str, object]
    notes: tuple[str, ...] = field(default=())

    def print(self, as_json: bool, bias: str = "") -> None:
        """Prints to standard output: the table and the notes, or the line of JSON."""
        if as_json:
            shown = {"columns": self.columns, "rows": self.rows, "notes": self.notes}
            line = {"bench": self.name, "bias": bias, **shown, **self.figures, **machine()}
            print(json.dumps(line, separators=(",", ":")))
            return
        table = Table(title=f"kvrecall bench {self.name}")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=None if sys.stdout.isatty() else 120, emoji=False)
        console.print(table)
        for note in [*self.notes, *([f"biased {bias}"] if bias else [])]:
            console.print(note, highlight=False, markup=False)


NO_ENGINE = "not installed"
"""Instead of a version."""

progress = ProgressLines("bench")
"""Reports a benchmark's progress on standard error."""


def names_in(text: str) -> tuple[str, ...]:
    """The comma-separated items."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def timed(act: Callable[[], object]) -> float:
    """Duration of a call in seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (nearest rank) and number of values."""
    return {
        "p10": round(_nearest(values, 10), 6),
        "p50": round(statistics.median(values), 6),
        "p90": round(_nearest(values, 90), 6),
        "n": len(values),
    }


def latencies(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 (nearest rank)."""
    return {f"p{percent}": round(_nearest(values, percent), 4) for percent in (50, 95, 99)}


def _nearest(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, percent * len(values) // 100)]


def cells(found: Mapping[str, float], digits: int, scale: float = 1.0) -> list[str]:
    """``percentiles`` as cells of a table: p10, median, p90."""
    return [f"{found[rank] * scale:.{digits}f}" for rank in ("p10", "p50", "p90")]


def machine() -> dict[str, object]:
    """Facts about the machine that figures depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "vllm": engine_version(),
        "kvrecall": __version__,
        "commit": _commit(),
    }


def engine_version() -> str:
    """Version of the installed vLLM, without importing it."""
    return installed_version(*DISTRIBUTIONS) or NO_ENGINE


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Commit of the source tree; ``+`` if it has changes other than results and pages generated
    from them. None outside of a repository."""
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    but = [f":(exclude,top){path}" for path in ("lab/results", "docs/images")]
    changed = _output("git", "-C", folder, "status", "--porcelain", "--", ":/", *but)
    return commit + ("+" if changed else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
