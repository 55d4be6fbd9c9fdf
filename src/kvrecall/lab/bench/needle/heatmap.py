"""The heat map: accuracy by length and depth, one panel an arm. Needs matplotlib (``plots``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrecall.errors import ConfigError
from kvrecall.lab.bench.needle.arms import Arm
from kvrecall.lab.bench.needle.score import Record, at, depth_of, placed, score

NEUTRAL = "#7a7f87"
"""Grey that reads on white and on near-black alike."""


def write_heatmap(
    records: Sequence[Record], arms: Sequence[Arm], bins: int, title: str, path: Path
) -> None:
    """Writes a PNG with transparent ground, readable on light and dark pages. Of questions about
    single facts, where there are such.

    Raises ConfigError where matplotlib is not installed.
    """
    figure_class = _matplotlib()
    records = placed(records)
    lengths = sorted({record.length for record in records})
    height = 1.6 + 0.34 * bins
    figure = figure_class(figsize=(1.6 + 0.75 * len(lengths) * len(arms), height), dpi=160)
    axes = figure.subplots(1, len(arms), squeeze=False, sharey=True)[0]
    image = None
    for index, (axis, arm) in enumerate(zip(axes, arms, strict=True)):
        cells = _cells(records, index, lengths, bins)
        image = axis.imshow(cells, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        _label(axis, arm.name, lengths, bins)
        _write_numbers(axis, cells)
    axes[0].set_ylabel("depth of the fact in the text", color=NEUTRAL)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.03, pad=0.02)
    bar.ax.tick_params(colors=NEUTRAL, labelsize=8)
    bar.outline.set_edgecolor(NEUTRAL)
    figure.suptitle(title, color=NEUTRAL, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight")


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a heat map needs matplotlib: pip install 'kvrecall[plots]'") from error
    return Figure


def _cells(
    records: Sequence[Record], arm: int, lengths: Sequence[int], bins: int
) -> list[list[float]]:
    """Per cent right, a row a depth and a column a length; nan where nothing was asked."""
    rows: list[list[float]] = []
    for depth in range(bins):
        here = [record for record in records if depth_of(record, bins) == depth]
        rows.append([score(at(here, length), arm).percent for length in lengths])
    return rows


def _label(axis: Any, name: str, lengths: Sequence[int], bins: int) -> None:
    axis.set_title(name, color=NEUTRAL, fontsize=9)
    axis.set_xticks(range(len(lengths)), [_short(length) for length in lengths])
    edges = range(bins)
    axis.set_yticks(edges, [f"{100 * edge // bins}-{100 * (edge + 1) // bins} %" for edge in edges])
    axis.tick_params(colors=NEUTRAL, labelsize=7)
    axis.set_xlabel("tokens", color=NEUTRAL, fontsize=8)
    for spine in axis.spines.values():
        spine.set_edgecolor(NEUTRAL)


def _write_numbers(axis: Any, cells: Sequence[Sequence[float]]) -> None:
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            if not math.isnan(value):  # a depth nobody asked about stays empty
                ink = "#101418" if value > 60 else "#f4f6f8"
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=7)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
