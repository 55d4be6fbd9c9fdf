"""``bench publish``: tables in documents, generated from a run's results.

``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` are on lines of their own; the text between
them is generated here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Any

from kvrecall.bench.report import GIB_S
from kvrecall.bench.restore import restore_table
from kvrecall.bench.serving import SERVED, serving_table
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.cli import BIAS

PAGES = tuple(
    map(
        PurePosixPath,
        ("README.md", "README.zh-CN.md", "docs/benchmarks.md", "docs/choosing.md"),
    )
)
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
    """``text`` of ``page`` (its path in the repository) with every marked part regenerated.

    Raises KvrecallError for an unknown name.
    """
    images = PLOTS if page.parent == PurePosixPath() else PLOTS.relative_to(page.parent)

    def part(match: re.Match[str]) -> str:
        make = TABLES.get(match[2])
        if make is None:
            raise KvrecallError(f"no table is named {match[2]!r}; known: {', '.join(TABLES)}")
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
        "retrieval": {"decode"},
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


Make = Callable[[Run], Iterator[str]]
"""Makes the lines of a marked part."""


def _if_measured(name: str, make: Make) -> Make:
    """``make``, or the reason if step ``name`` has no figures."""

    def table(run: Run) -> Iterator[str]:
        found = run["results"].get(name)
        if found is None:
            where = "`lab/results/latest.json`"
            yield f"Not part of the run in {where}; `make bench` measures it."
        elif "error" in found:
            yield f"Not measured: {found['error']}."
        else:
            yield from make(run)

    return table


def _of(name: str, make: Callable[[Figures], Iterator[str]]) -> Make:
    """``make`` of one step's figures."""
    return _if_measured(name, lambda run: make(run["results"][name]))


def machine(run: Run) -> Iterator[str]:
    """The machine of the last run, its load, and the steps that other machines ran before
    (``bench all --add`` keeps their results)."""
    facts, versions = run["machine"], run["versions"]
    elsewhere: dict[str, list[str]] = {}
    here: list[Figures] = []
    for name, found in run["results"].items():
        if (cpu := found.get("cpu", facts["cpu"])) == facts["cpu"]:
            here.append(found)
        else:
            elsewhere.setdefault(f"{cpu}, {found['cores']} cores", []).append(name)
    loads = [found["load_before"] for found in here or run["results"].values()]
    commits = sorted({found.get("commit") or "" for found in run["results"].values()} - {""})
    yield (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB of memory, "
        f"{facts['gpu'] or 'no GPU'}; Python {facts['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". kvrecall {', '.join(commits)}, {run['date'][:10]}. Load of the machine (1 minute) "
        f"when a benchmark began: {min(loads)} to {max(loads)}."
    )
    for other, names in elsewhere.items():
        yield ""
        yield f"On another machine ({other}): {', '.join(f'`{name}`' for name in names)}."
    if note := run.get("note"):
        yield ""
        yield str(note)


def bias(_: Run) -> Iterator[str]:
    """What each benchmark is biased towards."""
    for name, text in BIAS.items():
        yield f"- `{name}`: {text}."


def steps(run: Run) -> Iterator[str]:
    """Every command of the run, and its outcome. Files without their folders."""
    rows = [
        (
            f"`{' '.join(PurePosixPath(word).name for word in found['command'].split())}`",
            f"{found['took_s']:.0f}",
            f"{found['load_before']:.1f}",
            found.get("error", "done"),
        )
        for found in run["results"].values()
    ]
    yield from _table(("command", "seconds", "load before", "outcome"), rows)


def serving(found: Figures) -> Iterator[str]:
    yield from _table(*serving_table(found))
    yield ""
    yield (
        f"{found['story']}: {found['prompt_tokens']:,} prompt tokens, "
        f"{found['unique_bytes'] / 2**20:.0f} MiB of KV cache."
    )
    yield from _absent(found["absent"])


def against_lmcache(found: Figures) -> Iterator[str]:
    """The rows of ``serving`` that compare with LMCache's connector."""
    columns, rows = serving_table(found)
    names = {SERVED[variant] for variant in ("device", "host", "lmcache")}
    yield from _table(columns, [row for row in rows if row[0] in names])


def _absent(reasons: Mapping[str, str]) -> Iterator[str]:
    for name, reason in reasons.items():
        yield ""
        yield f"Left out: {name}: {reason.splitlines()[0]}"


_SERVED_ZH = {
    "none": "不用任何缓存",
    "device": "vLLM 自带的前缀缓存（设备显存）",
    "host": "kvrecall：主机内存",
    "disk": "kvrecall：主机内存和磁盘",
    "mooncake": "kvrecall：主机内存和 Mooncake Store",
    "lmcache": "LMCache 的 connector 和服务：主机内存",
}
"""Those with one engine, in Chinese."""


def tiers(found: Figures) -> Iterator[str]:
    """Bandwidths of memory and disk tiers, each with its limit."""
    short = ("memory", "put GiB/s", "get, first", "get, again", "ms a request p50 / p95 / p99")
    yield from _table(short, list(_stores(found["stores"], "memory", ("put", "cold", "warm"))))
    yield ""
    columns = ("disk", "checks", "put GiB/s", "put, durable", "get, cold", "get, warm")
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
        rates = [f"{one[p]['gb_s'] * GIB_S:.2f} ({one[p]['to_limit']:.2f})" for p in phases]
        last = "warm" if medium == "memory" else "cold"
        waits = " / ".join(f"{value:.1f}" for value in one[last]["request_ms"].values())
        checks = [] if medium == "memory" else ["yes" if one["checks"] else "no"]
        yield (f"**{name}**" if one["limit"] else name, *checks, *rates, waits)


REMOTE = "remote"
"""What a prefix that another server computed is called among those of ``restore``."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds to the first token behind a prefix, by its tier: percentiles, and the median of
    computing it, which the benchmark of the remote tier measures on its own servers."""

    source: str
    seconds: Mapping[str, float]
    computed: float

    @property
    def speed_up(self) -> float:
        return self.computed / self.seconds["p50"]


def first_tokens(results: Figures) -> list[FirstTokens]:
    """Slowest source of ``restore`` first, as it reports them; the remote store last."""
    times = results["restore"]["ttft_s"]
    found = [FirstTokens(name, one, times["computed"]["p50"]) for name, one in times.items()]
    remote = results.get("remote", {})
    if "ttft_remote_s" in remote and remote["tokens"] == results["restore"]["tokens"]:
        found.append(FirstTokens(REMOTE, remote["ttft_remote_s"], remote["ttft_computed_s"]["p50"]))
    return found


def restore(run: Run) -> Iterator[str]:
    """Times to first token by the tier of the prefix."""
    found = run["results"]["restore"]
    columns, rows = restore_table(found)
    for one in first_tokens(run["results"]):
        if one.source == REMOTE:
            ranks = (f"{one.seconds[rank] * 1e3:.1f}" for rank in ("p10", "p50", "p90"))
            to_device = f"{one.seconds['p50'] / found['ttft_s']['device']['p50']:.2f}"
            rows = (*rows, (REMOTE, *ranks, to_device, f"{one.speed_up:.0f}"))
    yield from _table(columns, rows)
    yield ""
    yield (
        f"A prefix of {found['tokens']:,} tokens, {found['prefix_bytes'] / 2**20:.0f} MiB of KV "
        f"cache. Arena to device {found['restore_gb_s'] * GIB_S:.1f} GiB/s, "
        f"{found['restore_to_plain']:.2f} of a plain copy of the same bytes."
    )
    if len(rows) > len(found["ttft_s"]):
        computed = run["results"]["remote"]["ttft_computed_s"]["p50"]
        yield (
            "The remote prefix comes from Mooncake Store over loopback and was computed by another "
            f"server, which took {computed:.2f} s; it is compared with that."
        )


_FIRST_TOKEN = (
    "Seconds to the first token of a prompt whose first {tokens:,} tokens were seen before "
    "({mib:.0f} MiB of KV cache), by where they lie; medians. Model: a Qwen3 shape of {layers} "
    "layers, {width:,} wide, random weights, {dtype}. Machine: {cpu}, {cores} cores, {gpu}. "
    "Remote: computed by another server, through Mooncake Store over loopback. A larger model "
    "gains more; a faster device gains less."
)
_FIRST_TOKEN_ZH = (
    "首 token 时延（秒，中位数）：提示词的前 {tokens:,} 个 token 以前出现过"
    "（KV Cache 共 {mib:.0f} MiB），按其所在位置比较。"
    "模型：Qwen3 结构，{layers} 层，宽 {width:,}，随机权重，{dtype}。"
    "机器：{cpu}，{cores} 核，{gpu}。remote：由另一个服务算出，经回环网络上的 Mooncake Store 取回。"
    "模型越大收益越大；设备算得越快收益越小。"
)


def _first_token(text: str, no_gpu: str) -> Make:
    """What the picture of the README shows, in one of its languages."""

    def make(run: Run) -> Iterator[str]:
        from kvrecall.bench.model import BenchModel  # takes seconds: PyTorch

        model = BenchModel(dtype="")
        facts = {**run["machine"], **run["results"]["restore"]}
        facts |= {"mib": facts["prefix_bytes"] / 2**20, "gpu": facts["gpu"] or no_gpu}
        yield text.format_map({**facts, "layers": model.layers, "width": model.hidden})

    return _if_measured("restore", make)


def decode(run: Run) -> Iterator[str]:
    """Attention of a decoded token: a line per context and share."""
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


def generate_table(rows: Sequence[Figures]) -> Table:
    """Whole engines: a line per length, number of sequences and mode; a column if it is known for
    one of them."""
    columns = (
        "engine", "context", "at once", "tokens/s", "ms a token", "to dense", "at 2/3",
        "attention", "blocks read", "device MiB",
    )  # fmt: skip
    cells = tuple(
        (
            str(one["mode"]),
            f"{one['context']:,}",
            f"{one['at_once']} of {one['sequences']}",
            f"{one['tokens_per_s']:.2f}",
            f"{one['ms_a_token']:.0f}",
            f"{one['times_dense']:.2f} ({one['times_dense_cpu']:.2f})",
            _cell(one.get("times_dense_at_two_thirds"), ".2f"),
            _cell(one["attention_share"], ".0%"),
            _cell(one["blocks_read_share"], ".0%"),
            f"{one['peak_device_bytes'] / 2**20:,.0f} of {one['device_cache_bytes'] / 2**20:,.0f}",
        )
        for one in rows
    )
    measured = [any(of) for of in zip(*cells, strict=True)]
    shown = [tuple(compress(line, measured)) for line in (columns, *cells)]
    return shown[0], tuple(shown[1:])


def _cell(value: float | None, form: str) -> str:
    """Empty where nothing was measured."""
    return "" if value is None else format(value, form)


def generate(found: Figures) -> Iterator[str]:
    """Tokens a second of whole engines, and what was left out."""
    yield from _table(*generate_table(found["rows"]))
    yield ""
    kib = found["kv_bytes_a_token"] / 1024
    yield (
        f"{found['params'] / 1e6:.0f} million parameters, {kib:.0f} KiB of KV a token, made up, "
        f"{found['share']:.0%} of the middle blocks, {found['threads']} threads. To "
        "dense: tokens a second in multiples of the dense engine's, by turns; in brackets tokens a "
        "second of processor time."
    )
    for text in found["left_out"]:
        yield ""
        yield f"Left out: {text}."


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
    """The pool's promises: a measured figure a line, and its goal."""
    rows = list(_promises(run["results"]))
    yield from _table(("measured", "here", "goal", "outcome"), rows)


def _promise(
    text: str, figure: float, goal: float, unit: str = "{:g}", is_limit: bool = False
) -> tuple[str, ...]:
    """``unit``: the format of both. ``is_limit``: ``goal`` is an upper bound, otherwise a lower
    one."""
    bound = f"{'at most' if is_limit else 'at least'} {unit.format(goal)}"
    shown = f"{figure:.2f}" if unit == "{:g}" else unit.format(figure)
    is_kept = figure <= goal if is_limit else figure >= goal
    return text, shown, bound, "met" if is_kept else "**missed**"


def _promises(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    good = {name: one for name, one in results.items() if "error" not in one}
    if one := good.get("lookup"):
        text = f"look-up of {one['blocks']:,} blocks, in host memory"
        yield _promise(text, one["median_us"]["find_host"], 1000, "{:,.0f} us", True)
    if one := good.get("disk"):
        yield _promise("disk tier reads, to bare direct I/O", one["read_ratio"], 0.85)
    if one := good.get("restore"):
        for text, figure, goal in (
            ("hit in host memory, to one on the device", "host_to_device", 1.3),
            ("hit on disk, to one on the device", "disk_to_device", 2.5),
            ("slowest of these hits, to computing", "worst_hit_to_computed", 0.1),
        ):
            yield _promise(text, one[figure], goal, is_limit=True)
        yield _promise("copies to the device, to one plain copy", one["restore_to_plain"], 0.8)
    if one := good.get("overhead"):
        text = "prefill throughput that saving costs"
        yield _promise(text, one["cost"]["p50"], 0.03, "{:.1%}", True)
    if one := good.get("throttle"):
        text = "hit on a disk of any bandwidth, to computing, worst median"
        yield _promise(text, one["worst_ratio"], one["goal"], is_limit=True)
    if one := good.get("service"):
        text = f"pool service: look-up of {one['lookup_blocks']:,} blocks"
        yield _promise(text, one["lookup_s"]["p50"] * 1e3, 2, "{:.2f} ms", True)
        text = "pool service: two clients restoring, to two plain copies"
        yield _promise(text, one["restore_to_plain"]["p50"], 0.9)
        text = f"pool service: start with {one['blocks_on_disk']:,} blocks on disk"
        yield _promise(text, one["start_s"]["ready"]["p50"], 3, "{:.1f} s", True)
    if one := good.get("remote"):
        for way in ("put", "get"):
            text = f"remote tier {way}s, to Mooncake's bare client"
            yield _promise(text, one[f"{way}_ratio"], 0.9)
        if "computed_to_remote" in one:
            text = "first token on another server's prefix, times as fast as computing it"
            yield _promise(text, one["computed_to_remote"], 3, "{:.1f}")


def summary(found: Figures) -> Iterator[str]:
    """For the README: deployments of one engine, side by side."""
    columns = ("served with", "prompt tokens recalled", "first token, median", "p95")
    served = {name: SERVED[name] for name in _SERVED_ZH}
    yield from _table((*columns, "prompt tokens a second"), _summary_rows(found, served))


def summary_zh(found: Figures) -> Iterator[str]:
    columns = ("部署方式", "命中的提示词 token", "首 token，中位数", "p95", "提示词 token/s")
    yield from _table(columns, _summary_rows(found, _SERVED_ZH))


def _summary_rows(found: Figures, served: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [
        (
            served[variant],
            f"{one['hit_rate']:.0%}",
            *(f"{one['ttft_s'][rank]:.2f} s" for rank in ("p50", "p95")),
            f"{one['tokens_per_s']:,.0f}",
        )
        for variant, one in found["variants"].items()
        if variant in served
    ]


_PICTURES: Mapping[str, tuple[str, str]] = {
    "first-token": ("restore", "Seconds to the first token: computed, device, host, disk, remote"),
    "first-token-zh": ("restore", "首 token 时延：计算、设备、主机内存、磁盘、远端"),
    "chat": ("chat", "Seconds to the first token, and where prompt tokens came from"),
    "tiers": ("tiers", "Bandwidth of memory and disk tiers"),
    "restore": ("restore", "Seconds to the first token: computed, device, host, disk, remote"),
    "decode": ("retrieval", "Milliseconds of attention of a token, a layer"),
}
"""The plot that stands above a table, and what it shows."""

TABLES: Mapping[str, Make] = {
    "machine": machine,
    "bias": bias,
    "steps": steps,
    "first-token": _first_token(_FIRST_TOKEN, "no GPU"),
    "first-token-zh": _first_token(_FIRST_TOKEN_ZH, "无 GPU"),
    "summary": _of("chat", summary),
    "summary-zh": _of("chat", summary_zh),
    "chat": _of("chat", serving),
    "against-lmcache": _of("chat", against_lmcache),
    "replay": _of("replay", serving),
    "tiers": _of("tiers", tiers),
    "pool": pool,
    "restore": _if_measured("restore", restore),
    "decode": decode,
    "generate": _of("generate", generate),
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
    from kvrecall_lab.bench.plots import write_plots

    run = read_run(results)
    written = write_plots(run, root / PLOTS)
    for page in PAGES:
        path = root / page
        text = path.read_text()
        if names_in(text):
            path.write_text(filled(text, run, page))
            written.append(path)
    return written
