"""The pictures of docs/digest-study.md, from what `study` wrote.

`python -m ...digests.plots study.json --out docs/images`: one a case, a panel a share: how often
the block attended to most is among the chosen, against what the digests cost in memory.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

INK = "#7a7f87"
"""Grey that reads on white and on near-black alike."""

LINES: Mapping[str, tuple[str, str]] = {
    "mean": ("#d55e00", "mean"),
    "mean + 0.5 std": ("#cc79a7", "mean + std / 2"),
    "mean + 2 std": ("#e69f00", "mean + 2 std"),
    "bounds": ("#0072b2", "min and max (bounds)"),
    "box 0.5": ("#009e73", "the same box, half as wide"),
}


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """One case. The ground is transparent."""
    shares = sorted({row["share"] for row in rows})
    figure = Figure(figsize=(3.1 * len(shares), 3.4), dpi=150)
    axes = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for axis, share in zip(axes, shares, strict=True):
        for kind, (colour, label) in LINES.items():
            points = sorted(
                (row["bytes"], row["first"], row["tokens"])
                for row in rows
                if row["digest"] == kind and row["share"] == share
            )
            costs, found, _ = zip(*points, strict=True)
            axis.plot(costs, found, color=colour, label=label, marker="o", markersize=4)
            if kind == "bounds":
                for cost, value, size in points:
                    axis.annotate(
                        str(size), (cost, value), color=INK, fontsize=7,
                        xytext=(0, 5), textcoords="offset points", ha="center",
                    )  # fmt: skip
        _dress(axis, f"{share:.0%} of the blocks chosen")
    axes[0].set_ylabel("the block looked for is chosen", color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=8,
        bbox_to_anchor=(0.5, -0.14),
    )  # fmt: skip
    figure.suptitle(title, color=INK, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight")


def _dress(axis: Any, title: str) -> None:
    axis.set_title(title, color=INK, fontsize=9)
    axis.set_xscale("log", base=2)
    ticks = [1 / 256, 1 / 64, 1 / 16, 1 / 4]
    axis.set_xticks(ticks, [f"1/{round(1 / tick)}" for tick in ticks])
    axis.set_ylim(0, 1.08)
    axis.set_xlabel("digests, of the KV's bytes", color=INK, fontsize=8)
    axis.grid(color=INK, alpha=0.25, linewidth=0.6)
    axis.tick_params(colors=INK, which="both", labelsize=8)
    for spine in axis.spines.values():
        spine.set_edgecolor(INK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    rows = [row for path in args.studies for row in json.loads(path.read_text())]
    for case in sorted({row["case"] for row in rows}):
        name = re.sub(r"[^a-z0-9]+", "-", case.lower())
        draw([row for row in rows if row["case"] == case], case, args.out / f"digests-{name}.png")
        print(args.out / f"digests-{name}.png")


if __name__ == "__main__":
    main()
