"""Plots: PNG with a transparent background, for light and dark pages. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrecall.bench.report import GIB_S
from kvrecall.bench.serving import SERVED, SOURCES
from kvrecall.errors import ConfigError
from kvrecall_lab.bench.tables import REMOTE, Run, first_tokens, plots_of

GREY = "#7a7f87"
"""Grey that is readable on white and on near-black."""
_COLOURS = ("#3b82c4", "#d08a2c", "#4f9d69", "#b5596b", "#8a6fb0", "#6b8e9e")


def matplotlib_figure(width: float, height: float, **options: Any) -> Any:
    """An empty figure; size in inches. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=160, **options)


def write_plots(run: Run, folder: Path) -> list[Path]:
    """Writes a plot of every available result; returns their paths. Raises ConfigError if
    matplotlib is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    good = {name: one for name, one in run["results"].items() if "error" not in one}
    written = []
    for name, draw in _PLOTS.items():
        figure = matplotlib_figure(8.0, 4.0, layout="constrained")
        if name in plots_of(run):
            draw(figure, good)
            path = folder / f"{name}.png"
            figure.savefig(path, transparent=True)
            written.append(path)
    return written


def _serving(figure: Any, results: Mapping[str, Any]) -> None:
    """First tokens by percentile, and where prompt tokens came from."""
    found = results["chat"]
    names = list(found["variants"])
    labels = [SERVED.get(name, name) for name in names]
    times, hits = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    ranks = ("p50", "p95", "p99")
    series = {r: [found["variants"][n]["ttft_s"][r] for n in names] for r in ranks}
    _bars(times, labels, series)
    times.set_title("seconds to the first token", fontsize=9, color=GREY)
    left = [0.0] * len(names)
    for source, colour in zip(SOURCES, _COLOURS, strict=False):
        shares = [found["variants"][n]["hit_rate_by_tier"].get(source, 0.0) for n in names]
        if any(shares):
            label = "other connector" if source == "unspecified" else source
            hits.barh(range(len(names)), shares, left=left, color=colour, label=label, height=0.6)
            left = [a + b for a, b in zip(left, shares, strict=True)]
    hits.set_title("share of prompt tokens recalled", fontsize=9, color=GREY)
    hits.set_xlim(0, 1)
    _dress(hits)
    _legend(hits, columns=2)


def _tiers(figure: Any, results: Mapping[str, Any]) -> None:
    """Bandwidth of every library, memory beside disk."""
    found = results["tiers"]
    figure.set_size_inches(8.0, 4.6)
    memory, disk = figure.subplots(2, 1, height_ratios=(4, 9))
    kinds = ((memory, "memory", ("put", "warm")), (disk, "disk", ("durable", "cold", "warm")))
    for axis, medium, phases in kinds:
        stores = {n: one for n, one in found["stores"].items() if one["medium"] == medium}
        words = {"put": "put", "durable": "put, durable", "cold": "get, cold", "warm": "get, warm"}
        series = {words[p]: [one[p]["gb_s"] * GIB_S for one in stores.values()] for p in phases}
        _bars(axis, list(stores), series)
        axis.set_title(f"{medium}, GiB/s", fontsize=9, color=GREY)


def _restore(figure: Any, results: Mapping[str, Any]) -> None:
    """Time to first token on a prefix, by its tier, with the factor to computing it."""
    found = first_tokens(results)
    figure.set_size_inches(8.0, 2.4)
    axis = figure.subplots()
    colours = {"computed": GREY, REMOTE: _COLOURS[1]}
    for place, one in enumerate(found):
        seconds = one.seconds["p50"]
        axis.barh(place, seconds, height=0.6, color=colours.get(one.source, _COLOURS[0]))
        faster = "" if one.source == "computed" else f" ({one.speed_up:.0f} times as fast)"
        axis.text(seconds, place, f"  {seconds:.2f} s{faster}", va="center", fontsize=9, color=GREY)
    axis.set_yticks(range(len(found)), [one.source for one in found])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(one.seconds["p50"] for one in found))
    tokens = results["restore"]["tokens"]
    title = f"seconds to the first token, {tokens:,} tokens seen before"
    axis.set_title(title, fontsize=9, color=GREY)
    _dress(axis)
    axis.grid(False)


def _retrieval(figure: Any, results: Mapping[str, Any]) -> None:
    """Time of attention to dense, by share and context."""
    decodes = [one for name, one in results.items() if name.startswith("decode")]
    axis = figure.subplots()
    labels = [f"{one['context'] >> 10}K, {one['selected_share']:.0%} chosen" for one in decodes]
    shown = {
        "dense": [one["dense_ms"] for one in decodes],
        "retrieval": [one["sparse_ms"] for one in decodes],
        "retrieval, blocks off the device": [one.get("offload_ms", 0.0) for one in decodes],
    }
    _bars(axis, labels, shown)
    axis.set_title("attention of a decoded token, ms a layer", fontsize=9, color=GREY)


def _bars(axis: Any, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars, a group a label, a colour a series; the first label on top."""
    height = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [n + (place - (len(series) - 1) / 2) * height for n in range(len(labels))]
        axis.barh(at, values, height=height * 0.9, color=_COLOURS[place], label=name)
    axis.set_yticks(range(len(labels)), labels)
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
    _dress(axis)
    _legend(axis)


def _legend(axis: Any, columns: int = 3) -> None:
    """The legend, below the axis, where it covers nothing."""
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=axis.transAxes,
        borderaxespad=2.2,
        ncols=columns,
        columnspacing=1.2,
        fontsize=8,
        labelcolor=GREY,
        frameon=False,
    )


def _dress(axis: Any) -> None:
    """Grey text and lines, readable on light and dark backgrounds."""
    axis.tick_params(colors=GREY, labelsize=8)
    for name, spine in axis.spines.items():
        spine.set_color(GREY)
        spine.set_visible(name in ("left", "bottom"))
    axis.grid(axis="x", color=GREY, alpha=0.25)
    axis.set_axisbelow(True)


_PLOTS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "chat": _serving,
    "tiers": _tiers,
    "restore": _restore,
    "retrieval": _retrieval,
}
