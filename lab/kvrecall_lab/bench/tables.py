"""``bench publish``: a run's results in the documents.

``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` are on lines of their own; the text between
them is generated here and nowhere else. The picture of first tokens is an SVG, made here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrecall.bench.serving import SERVED
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.cli import COMMANDS

PAGES = ("README.md", "README.zh-CN.md", "docs/benchmarks.md", "docs/choosing.md")
"""Whose marked parts are filled."""

PICTURE = "docs/images/first-token.svg"

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
    """The machine of the last run, its load, and the steps that other machines ran before
    (``bench all --add`` keeps their results)."""
    facts, results = run["machine"], run["results"]
    elsewhere: dict[str, list[str]] = {}
    for name, found in results.items():
        if found.get("cpu", facts["cpu"]) != facts["cpu"]:
            place = f"{found['cpu']}, {found['cores']} cores"
            elsewhere.setdefault(place, []).append(f"`{name}`")
    commits = sorted({found.get("commit") or "" for found in results.values()} - {""})
    loads = [found["load_before"] for found in results.values()]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB of memory, "
        f"{facts['gpu'] or 'no GPU'}; Python {facts['python']}, {versions}. kvrecall "
        f"{', '.join(commits)}, {run['date'][:10]}. Load of the machine (1 minute) when a "
        f"benchmark began: {min(loads)} to {max(loads)}."
    )
    for other, names in elsewhere.items():
        yield ""
        yield f"On another machine ({other}): {', '.join(names)}."
    if note := run.get("note"):
        yield ""
        yield str(note)


def bias(run: Run) -> Iterator[str]:
    """What each benchmark is biased towards."""
    for name, (_, _, favours) in COMMANDS.items():
        if favours:
            yield f"- `{name}`: {favours}."


def steps(run: Run) -> Iterator[str]:
    """Every command of the run, and its outcome."""
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


_SERVED_ZH = {
    "none": "不用任何缓存",
    "device": "vLLM 自带的前缀缓存（设备显存）",
    "host": "kvrecall：主机内存",
    "disk": "kvrecall：主机内存和磁盘",
    "mooncake": "kvrecall：主机内存和 Mooncake Store",
    "lmcache": "LMCache 的 connector 和服务：主机内存",
}
"""Deployments of one engine, in Chinese."""
_SERVED = {name: SERVED[name] for name in _SERVED_ZH}


def _summary(columns: str, served: Mapping[str, str]) -> Make:
    """Deployments of the serving benchmark, side by side."""

    def lines(found: Mapping[str, Any]) -> Iterator[str]:
        rows = [
            (
                served[variant],
                f"{one['hit_rate']:.0%}",
                *(f"{one['ttft_s'][rank]:.2f} s" for rank in ("p50", "p95")),
                f"{one['tokens_per_s']:,.0f}",
            )
            for variant, one in found["variants"].items()
            if variant in served
        ]
        yield from _table(columns.split(" | "), rows)

    return _of("chat", lines)


_COLUMNS = (
    "served with | prompt tokens recalled | first token, median | p95 | prompt tokens a second"
)
_COLUMNS_ZH = "部署方式 | 命中的提示词 token | 首 token，中位数 | p95 | 提示词 token/s"


# -- first tokens ----------------------------------------------------------------------------


def first_tokens(results: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """By source, slowest first and the remote store last: the median of seconds to the first token
    behind a prefix, and how many times as fast that is as computing it on the same servers."""
    restore, remote = results["restore"], results.get("remote", {})
    times = restore["ttft_s"]
    computed = times["computed"]["p50"]
    found = [(source, one["p50"], computed / one["p50"]) for source, one in times.items()]
    if "ttft_remote_s" in remote and remote["tokens"] == restore["tokens"]:
        seconds = remote["ttft_remote_s"]["p50"]
        found.append(("remote", seconds, remote["ttft_computed_s"]["p50"] / seconds))
    return found


def picture(run: Run) -> str:
    """``first_tokens`` as bars, in grey that is readable on white and on near-black."""
    found = first_tokens(run["results"])
    longest = max(seconds for _, seconds, _ in found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {28 + 36 * len(found)}"'
        ' font-family="sans-serif" font-size="14" fill="#7a7f87">',
        f'<text x="90" y="16">seconds to the first token, '
        f"{run['results']['restore']['tokens']:,} tokens seen before</text>",
    ]
    for place, (source, seconds, factor) in enumerate(found):
        y, width = 28 + 36 * place, 1 + 600 * seconds / longest
        colour = {"computed": "#7a7f87", "remote": "#d08a2c"}.get(source, "#3b82c4")
        faster = "" if source == "computed" else f" ({factor:.0f} times as fast)"
        lines += [
            f'<text x="80" y="{y + 19}" text-anchor="end">{source}</text>',
            f'<rect x="90" y="{y}" width="{width:.0f}" height="26" fill="{colour}"/>',
            f'<text x="{width + 98:.0f}" y="{y + 19}">{seconds:.2f} s{faster}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def restore(run: Run) -> Iterator[str]:
    """The report, and the remote store beside it."""
    yield from _of("restore", report)(run)
    if "ttft_s" not in run["results"].get("restore", {}):
        return
    source, seconds, factor = first_tokens(run["results"])[-1]
    if source == "remote":
        yield ""
        yield (
            f"From Mooncake Store over loopback, computed by another server: {seconds * 1e3:.1f} "
            f"ms, {factor:.0f} times as fast as computing on those servers."
        )


_FIRST_TOKEN = (
    "![Seconds to the first token: computed, device, host, disk, remote]({picture})\n\n"
    "Seconds to the first token of a prompt whose first {tokens:,} tokens were seen before "
    "({mib:.0f} MiB of KV cache), by where they lie; medians. Model: a Qwen3 shape of {layers} "
    "layers, {width:,} wide, random weights, {dtype}. Machine: {cpu}, {cores} cores, {gpu}. "
    "Remote: computed by another server, through Mooncake Store over loopback. A larger model "
    "gains more; a faster device gains less."
)
_FIRST_TOKEN_ZH = (
    "![首 token 时延：计算、设备、主机内存、磁盘、远端]({picture})\n\n"
    "首 token 时延（秒，中位数）：提示词的前 {tokens:,} 个 token 以前出现过"
    "（KV Cache 共 {mib:.0f} MiB），按其所在位置比较。"
    "模型：Qwen3 结构，{layers} 层，宽 {width:,}，随机权重，{dtype}。"
    "机器：{cpu}，{cores} 核，{gpu}。remote：由另一个服务算出，经回环网络上的 Mooncake Store 取回。"
    "模型越大收益越大；设备算得越快收益越小。"
)


def _first_token(text: str, no_gpu: str) -> Make:
    """The picture of the README, and what it shows."""

    def lines(found: Mapping[str, Any]) -> Iterator[str]:
        from kvrecall.bench.model import BenchModel  # takes seconds: PyTorch

        model = BenchModel(dtype="")
        facts = {**found, "mib": found["prefix_bytes"] / 2**20, "gpu": found["gpu"] or no_gpu}
        facts |= {"layers": model.layers, "width": model.hidden, "picture": PICTURE}
        yield text.format_map(facts)

    return _of("restore", lines)


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
    names = {SERVED[variant] for variant in ("device", "host", "lmcache")}
    yield from _table(found["columns"], [row for row in found["rows"] if row[0] in names])


TABLES: Mapping[str, Make] = {
    "machine": machine,
    "bias": bias,
    "steps": steps,
    "first-token": _first_token(_FIRST_TOKEN, "no GPU"),
    "first-token-zh": _first_token(_FIRST_TOKEN_ZH, "无 GPU"),
    "summary": _summary(_COLUMNS, _SERVED),
    "summary-zh": _summary(_COLUMNS_ZH, _SERVED_ZH),
    "against-lmcache": _of("chat", _against_lmcache),
    "pool": pool,
    "restore": restore,
    **{name: _of(name, report) for name in ("chat", "tiers", "decode", "needle")},
}


def read_run(path: Path) -> dict[str, Any]:
    """A run that ``bench all`` wrote. Raises KvrecallError."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise KvrecallError(f"{path}: no results of a run: {error}") from error


def publish(results: Path, root: Path) -> list[Path]:
    """Draws the picture below ``root`` and fills the tables of its pages; returns what it wrote."""
    run = read_run(results)
    texts = {root / page: filled((root / page).read_text(), run) for page in PAGES}
    if "ttft_s" in run["results"].get("restore", {}):
        texts[root / PICTURE] = picture(run)
    for path, text in texts.items():
        path.write_text(text)
    return [*texts]
