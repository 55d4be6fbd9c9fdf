"""``kvrecall bench publish``: tables in documents, made from a run's results.

``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` stand on lines of their own; what is between
them is made here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kvrecall.errors import KvrecallError
from kvrecall.lab.bench.report import BIAS

PAGES = (PurePosixPath("README.md"), PurePosixPath("docs/benchmarks.md"))
"""Whose marked parts are filled."""

Run = Mapping[str, Any]
"""What ``bench all`` writes."""

Figures = Mapping[str, Any]
"""What one step of a run measured."""

Table = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]
"""Columns and rows, as a page and the benchmark's own report show them."""

PLOTS = PurePosixPath("docs/images/bench")
"""Where plots lie in the repository."""

_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def filled(text: str, run: Run, page: PurePosixPath) -> str:
    """``text`` of ``page`` (its path in the repository) with every marked part made anew.

    KvrecallError for a name there is none of.
    """
    images = PLOTS if page.parent == PurePosixPath() else PLOTS.relative_to(page.parent)

    def part(match: re.Match[str]) -> str:
        make = TABLES.get(match[2])
        if make is None:
            raise KvrecallError(f"no table is called {match[2]!r}; there are: {', '.join(TABLES)}")
        lines = list(make(run))
        plot, story = _PICTURES.get(match[2], ("", ""))
        if plot in plots_of(run):
            lines = [f"![{story}]({images / plot}.png)", "", *lines]
        body = "\n".join(lines)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return _MARKED.sub(part, text)


def plots_of(run: Run) -> set[str]:
    """Names of the plots that can be drawn of a run."""
    good = {name.split()[0] for name, one in run["results"].items() if "error" not in one}
    needs = {
        "chat": {"chat"},
        "tiers": {"tiers"},
        "restore": {"restore"},
        "retrieval": {"decode", "needle"},
    }
    return {name for name, needed in needs.items() if needed <= good}


def names_in(text: str) -> list[str]:
    """Names of the marked parts."""
    return [match[2] for match in _MARKED.finditer(text)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "|".join("---" if not place else "---:" for place in range(len(columns))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _of(name: str, make: Callable[[Figures], Iterator[str]]) -> Callable[[Run], Iterator[str]]:
    """For tables of one step's figures: where there are none, why there are none."""

    def table(run: Run) -> Iterator[str]:
        found = run["results"].get(name)
        if found is None:
            where = "`bench/results/latest.json`"
            yield f"Not part of the run in {where}; `make bench` measures it."
        elif "error" in found:
            yield f"Not measured: {found['error']}."
        else:
            yield from make(found)

    return table


def machine(run: Run) -> Iterator[str]:
    """What it ran on, and how busy that was."""
    facts, versions = run["machine"], run["versions"]
    loads = [found["load_before"] for found in run["results"].values()]
    commits = sorted({found.get("commit") or "" for found in run["results"].values()} - {""})
    yield (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB of memory, "
        f"{facts['gpu'] or 'no GPU'}; Python {facts['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". kvrecall {', '.join(commits)}, {run['date'][:10]}. Load of the machine (1 minute) "
        f"when a benchmark began: {min(loads)} to {max(loads)}."
    )
    if note := run.get("note"):
        yield ""
        yield str(note)


def bias(_: Run) -> Iterator[str]:
    """What each benchmark is biased towards."""
    for name, text in BIAS.items():
        yield f"- `{name}`: {text}."


def steps(run: Run) -> Iterator[str]:
    """Every command of the run, and how it ended."""
    rows = [
        (
            f"`{found['command']}`",
            f"{found['took_s']:.0f}",
            f"{found['load_before']:.1f}",
            found.get("error", "done"),
        )
        for found in run["results"].values()
    ]
    yield from _table(("command", "seconds", "load before", "outcome"), rows)


def serving_table(found: Figures) -> Table:
    """Conversations, or a slice of a trace: a line a deployment."""
    rows = tuple(
        (
            SERVED.get(variant, variant),
            f"{one['seconds']:.0f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['hit_rate']:.0%}",
            *(f"{one['ttft_s'][rank]:.2f}" for rank in ("p50", "p95", "p99")),
            f"{one['tpot_s']['p50'] * 1e3:.0f}",
        )
        for variant, one in found["variants"].items()
    )
    columns = ("served with", "s", "prompt tokens/s", "hits", "TTFT p50, s", "p95", "p99")
    return (*columns, "ms a token"), rows


def serving(found: Figures) -> Iterator[str]:
    yield from _table(*serving_table(found))
    yield ""
    yield (
        f"{found['story']}: {found['prompt_tokens']:,} prompt tokens, "
        f"{found['unique_bytes'] / 2**20:.0f} MiB of KV cache."
    )
    yield from _absent(found["absent"])


def _absent(reasons: Mapping[str, str]) -> Iterator[str]:
    for name, reason in reasons.items():
        yield ""
        yield f"Left out: {name}: {reason.splitlines()[0]}"


SERVED = {
    "none": "no cache at all",
    "device": "vLLM's prefix cache (device)",
    "host": "kvrecall: host",
    "disk": "kvrecall: host and disk",
    "mooncake": "kvrecall: host and Mooncake Store",
    "lmcache": "LMCache's connector and server: host",
    "two": "kvrecall: two engines, a pool each",
    "service": "kvrecall: two engines, one pool service",
}
"""Deployments of the serving benchmarks in words."""


SOURCES = ("device", "host", "disk", "remote", "unspecified")
"""Where prompt tokens came from; ``unspecified``: what another project's connector brought."""


def tiers(found: Figures) -> Iterator[str]:
    """Bandwidths of memory and disk tiers, each with its limit."""
    short = ("memory", "put GB/s", "get, first", "get, again", "ms a request p50 / p95 / p99")
    yield from _table(short, list(_stores(found["stores"], "memory", ("put", "cold", "warm"))))
    yield ""
    columns = ("disk", "checks", "put GB/s", "put, durable", "get, cold", "get, warm")
    rows = _stores(found["stores"], "disk", ("put", "durable", "cold", "warm"))
    yield from _table((*columns, "ms a request, cold, p50 / p95 / p99"), list(rows))
    yield ""
    yield (
        f"{found['requests']} requests of {found['request_blocks']} blocks of "
        f"{found['block_bytes'] >> 10} KiB a round, {found['rounds']} rounds, medians of rounds; "
        "in brackets the ratio to the limit (in bold), round by round."
    )
    yield from _absent(found["absent"])


def _stores(
    stores: Mapping[str, Any], medium: str, phases: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    for name, one in stores.items():
        if one["medium"] != medium:
            continue
        rates = [f"{one[p]['gb_s']:.2f} ({one[p]['to_limit']:.2f})" for p in phases]
        last = "warm" if medium == "memory" else "cold"
        waits = " / ".join(f"{value:.1f}" for value in one[last]["request_ms"].values())
        checks = [] if medium == "memory" else ["yes" if one["checks"] else "no"]
        yield (f"**{name}**" if one["limit"] else name, *checks, *rates, waits)


def restore_table(found: Figures) -> Table:
    """Milliseconds to the first token, by where the prefix lay."""
    times = found["ttft_s"]
    device, computed = times["device"]["p50"], times["computed"]["p50"]
    rows = tuple(
        (
            source,
            *(f"{times[source][rank] * 1e3:.1f}" for rank in ("p10", "p50", "p90")),
            f"{times[source]['p50'] / device:.2f}",
            f"{computed / times[source]['p50']:.0f}",
        )
        for source in times
    )
    columns = ("prefix from", "first token after, ms: p10", "p50", "p90", "to device hit")
    return (*columns, "times as fast as computing"), rows


def restore(found: Figures) -> Iterator[str]:
    yield from _table(*restore_table(found))
    yield ""
    yield (
        f"A prefix of {found['tokens']:,} tokens, {found['prefix_bytes'] / 2**20:.0f} MiB of KV "
        f"cache. Arena to device {found['restore_gb_s']:.1f} GB/s, "
        f"{found['restore_to_plain']:.2f} of a plain copy of the same bytes."
    )


def decode(run: Run) -> Iterator[str]:
    """Attention of a decoded token: a line a context and share."""
    found = [
        one
        for name, one in run["results"].items()
        if name.startswith("decode") and "error" not in one
    ]
    rows = [
        (
            f"{one['context']:,}",
            f"{one['selected_share']:.0%}",
            f"{one['attended_share']:.1%}",
            f"{one['dense_ms']:.2f}",
            f"{one['sparse_ms']:.2f}",
            f"{one['attention_ratio']:.2f}",
            f"{one['offload_ratio']:.2f}" if "offload_ratio" in one else "",
        )
        for one in found
    ]
    columns = ("context", "blocks chosen", "tokens attended to", "dense, ms a layer", "retrieval")
    yield from _table((*columns, "ratio", "ratio, blocks off the device"), rows)


def needle(found: Figures) -> Iterator[str]:
    """Right answers of each variant by length."""
    arms = {"dense": found["dense"], **{arm["name"]: arm["results"] for arm in found["arms"]}}
    rows = []
    for name, scores in arms.items():
        cells = [scores[str(length)]["all"] for length in found["lengths"]]
        rows.append(
            (name, *(f"{one['percent']:.0f} ({one['right']} of {one['asked']})" for one in cells))
        )
    yield from _table(("per cent right", *(f"{n:,} tokens" for n in found["lengths"])), rows)


def pool(run: Run) -> Iterator[str]:
    """What the pool promises, a line a promise."""
    yield from _table(("measured", "here", "goal"), list(_promises(run["results"])))


def _promises(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    good = {name: one for name, one in results.items() if "error" not in one}
    if one := good.get("lookup"):
        text = f"{one['median_us']['find_host']:.0f} us"
        yield f"look-up of {one['blocks']:,} blocks, in host memory", text, "1,000 us"
    if one := good.get("disk"):
        yield "disk tier reads, to bare direct I/O", f"{one['read_ratio']:.2f}", "0.85"
        yield "disk tier writes, to bare direct I/O", f"{one['write_ratio']:.2f}", ""
    if one := good.get("overhead"):
        yield "prefill throughput that saving costs", f"{one['cost']['p50']:.1%}", "3%"
    if one := good.get("throttle"):
        text = "hit on a disk of any bandwidth, to computing, worst median"
        yield text, f"{one['worst_ratio']:.2f}", f"{one['goal']}"
    if one := good.get("service"):
        blocks = f"{one['lookup_blocks']:,}"
        yield f"pool service: look-up of {blocks} blocks", _ms(one["lookup_s"]), "2 ms"
        text = "pool service: two clients restoring, to two plain copies"
        yield text, f"{one['restore_to_plain']['p50']:.2f}", "0.9"
        text = f"pool service: start with {one['blocks_on_disk']:,} blocks on disk"
        yield text, f"{one['start_s']['ready']['p50']:.1f} s", "3 s"
    if one := good.get("remote"):
        yield "remote tier puts, to Mooncake's bare client", f"{one['put_ratio']:.2f}", "0.9"
        yield "remote tier gets, to Mooncake's bare client", f"{one['get_ratio']:.2f}", "0.9"
        if "computed_to_remote" in one:
            text = "first token on another server's prefix, to computing it"
            yield text, f"{one['computed_to_remote']:.1f} times as fast", "3"


def _ms(seconds: Mapping[str, float]) -> str:
    return f"{seconds['p50'] * 1e3:.2f} ms"


def summary(found: Figures) -> Iterator[str]:
    """For the README: what a first token waits for, by where its prompt lies."""
    rows = [
        (
            SERVED.get(variant, variant),
            f"{one['hit_rate']:.0%}",
            *(f"{one['ttft_s'][rank]:.2f} s" for rank in ("p50", "p95")),
            f"{one['tokens_per_s']:,.0f}",
        )
        for variant, one in found["variants"].items()
    ]
    columns = ("served with", "prompt tokens recalled", "first token, median", "p95")
    yield from _table((*columns, "prompt tokens a second"), rows)
    yield ""
    yield f"{found['story'][0].upper()}{found['story'][1:]}, on {found['cores']} cores."


_PICTURES: Mapping[str, tuple[str, str]] = {
    "summary": ("chat", "Seconds to the first token, and where prompt tokens came from"),
    "chat": ("chat", "Seconds to the first token, and where prompt tokens came from"),
    "tiers": ("tiers", "Bandwidth of memory and disk tiers"),
    "restore": ("restore", "Milliseconds to the first token"),
    "decode": ("retrieval", "Time of attention, and answers that stay right"),
}
"""The plot that stands above a table, and what it shows."""

TABLES: Mapping[str, Callable[[Run], Iterator[str]]] = {
    "machine": machine,
    "bias": bias,
    "steps": steps,
    "summary": _of("chat", summary),
    "chat": _of("chat", serving),
    "replay": _of("replay", serving),
    "tiers": _of("tiers", tiers),
    "pool": pool,
    "restore": _of("restore", restore),
    "decode": decode,
    "needle": _of("needle", needle),
}


def read_run(path: Path) -> dict[str, Any]:
    """A run that ``bench all`` wrote. Raises KvrecallError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise KvrecallError(f"{path}: no results of a run: {error}") from error


def publish(results: Path, root: Path) -> list[Path]:
    """Draws the plots below ``root`` and fills the tables of its pages; returns what it wrote."""
    from kvrecall.lab.bench.plots import write_plots

    run = read_run(results)
    written = write_plots(run, root / PLOTS)
    for page in PAGES:
        path = root / page
        text = path.read_text()
        if names_in(text):
            path.write_text(filled(text, run, page))
            written.append(path)
    return written
