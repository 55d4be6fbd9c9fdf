"""``bench publish``: a run's results in the documents.

``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` are on lines of their own; the text between
them is generated here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrecall.errors import KvrecallError

PAGES = ("docs/benchmarks.md", "docs/choosing.md")
"""Whose marked parts are filled."""

Run = Mapping[str, Any]
"""What ``bench all`` writes."""

Make = Callable[[Run], Iterator[str]]
"""Makes the lines of a marked part."""

_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def filled(text: str, run: Run) -> str:
    """``text`` with every marked part regenerated. Raises KvrecallError for an unknown name."""

    def part(match: re.Match[str]) -> str:
        make = TABLES.get(match[2])
        if make is None:
            raise KvrecallError(f"no table is named {match[2]!r}; known: {', '.join(TABLES)}")
        body = "\n".join(make(run))
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _MARKED.sub(part, text)


def names_in(text: str) -> list[str]:
    """Names of the marked parts."""
    return [match[2] for match in _MARKED.finditer(text)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "|".join("---" if not place else "---:" for place in range(len(columns))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _of(name: str, make: Callable[[Mapping[str, Any]], Iterator[str]]) -> Make:
    """``make`` of one step's results, or the reason if it has none."""

    def lines(run: Run) -> Iterator[str]:
        found = run["results"].get(name)
        if found is None:
            yield "Not part of the run in `lab/results/latest.json`; `make bench` measures it."
        elif "error" in found:
            yield f"Not measured: {found['error']}."
        else:
            yield from make(found)

    return lines


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """A benchmark's table and notes as it printed them."""
    yield from _table(found["columns"], found["rows"])
    for note in found["notes"]:
        yield ""
        yield f"{note[0].upper()}{note[1:]}."


def machine(run: Run) -> Iterator[str]:
    """The machines, and what was measured on each (``bench all --add`` keeps older results)."""
    places: dict[str, list[str]] = {}
    for name, found in run["results"].items():
        facts = run["machine"] | found
        place = f"{facts['cpu']}, {facts['cores']} cores, {facts['gpu'] or 'no GPU'}"
        places.setdefault(place, []).append(f"`{name}`")
    for place, names in places.items():
        yield f"- {place}: {', '.join(names)}"
    commits = sorted({found.get("commit") or "" for found in run["results"].values()} - {""})
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield f"- Python {run['machine']['python']}, {versions}; kvrecall {', '.join(commits)}"
    if note := run.get("note"):
        yield f"- {note}"


# -- promises --------------------------------------------------------------------------------


def pool(run: Run) -> Iterator[str]:
    """The pool's promises: a measured figure a line, and its goal."""
    rows = []
    for text, name, figure, goal, unit, scale in _PROMISES:
        found: Any = run["results"].get(name, {})
        for key in figure.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            continue
        most, number = goal.startswith("<"), float(goal[1:])
        is_kept = found * scale <= number if most else found * scale >= number
        shown, bound = (unit.format(one) for one in (found * scale, number))
        outcome = "met" if is_kept else "**missed**"
        rows.append((text, shown, f"{'at most' if most else 'at least'} {bound}", outcome))
    yield from _table(("measured", "here", "goal", "outcome"), rows)


_PROMISES = (
    ("look-up of 1,000 blocks, in host memory",
     "lookup", "median_us.find_host", "<1000", "{:,.0f} us", 1),
    ("disk tier reads, to bare direct I/O", "disk", "read_ratio", ">0.85", "{:.2f}", 1),
    ("hit in host memory, to one on the device", "restore", "host_to_device", "<1.3", "{:.2f}", 1),
    ("hit on disk, to one on the device", "restore", "disk_to_device", "<2.5", "{:.2f}", 1),
    ("slowest of these hits, to computing",
     "restore", "worst_hit_to_computed", "<0.1", "{:.2f}", 1),
    ("copies to the device, to one plain copy",
     "restore", "restore_to_plain", ">0.8", "{:.2f}", 1),
    ("prefill throughput that saving costs", "overhead", "cost.p50", "<0.03", "{:.1%}", 1),
    ("pool service: look-up of 1,000 blocks", "service", "lookup_s.p50", "<2", "{:.2f} ms", 1e3),
    ("pool service: two clients restoring, to two plain copies",
     "service", "restore_to_plain.p50", ">0.9", "{:.2f}", 1),
    ("pool service: start with 100,000 blocks on disk",
     "service", "start_s.ready.p50", "<3", "{:.1f} s", 1),
    ("remote tier puts, to Mooncake's bare client", "remote", "put_ratio", ">0.9", "{:.2f}", 1),
    ("remote tier gets, to Mooncake's bare client", "remote", "get_ratio", ">0.9", "{:.2f}", 1),
    ("first token on another server's prefix, times as fast as computing it",
     "remote", "computed_to_remote", ">3", "{:.1f}", 1),
)  # fmt: skip
"""What is measured, by which benchmark under which name, its goal, and how both are shown."""


def _against_lmcache(found: Mapping[str, Any]) -> Iterator[str]:
    """The rows of the serving benchmark that compare with LMCache's connector."""
    compared = ("device", "host", "lmcache")
    pairs = zip(found["variants"], found["rows"], strict=True)
    yield from _table(found["columns"], [row for name, row in pairs if name in compared])


TABLES: Mapping[str, Make] = {
    "machine": machine,
    "against-lmcache": _of("chat", _against_lmcache),
    "pool": pool,
    **{name: _of(name, report) for name in ("restore", "chat", "tiers")},
}


def read_run(path: Path) -> dict[str, Any]:
    """A run that ``bench all`` wrote. Raises KvrecallError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise KvrecallError(f"{path}: no results of a run: {error}") from error


def publish(results: Path, root: Path) -> list[Path]:
    """Fills the tables of the pages below ``root``; returns what it wrote."""
    run = read_run(results)
    for path in [root / page for page in PAGES]:
        path.write_text(filled(path.read_text(), run))
    return [root / page for page in PAGES]
