"""Tables and plots show the figures of the benchmarks' own reports."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench import overhead, restore, service, serving
from kvrecall.bench.report import Report, machine
from kvrecall.bench.workload import Run, conversations
from kvrecall.processes.server import Answer
from kvrecall_lab.bench import decode, remote, throttle
from kvrecall_lab.bench.needle.score import DENSE, Record, Results, Variant, report_of
from kvrecall_lab.bench.plots import write_plots
from kvrecall_lab.bench.serving import DEPLOYMENTS
from kvrecall_lab.bench.tables import TABLES
from kvrecall_lab.engines.decode import DecodeTimes

SECONDS = [0.1, 0.2, 0.3]


def _restore() -> Report:
    rates = {"restore_gb_s": 20.3, "plain_copy_gb_s": 22.0, "restore_to_plain": 0.92}
    times = {"computed": [10.0], "device": [0.08], "host": [0.1], "disk": [0.12]}
    facts = {"tokens": 8192, "prefix_bytes": 64 << 20, "moved_bytes": 64 << 20,
             "dtype": "bfloat16"}  # fmt: skip
    return restore._report(times, facts, rates)


def _remote() -> Report:
    rates = {f"{way}_{who}_bytes_per_s": 1e9 for way in ("put", "get") for who in ("tier", "bare")}
    ratios = {"put_ratio": 0.8, "get_ratio": 0.98, "blocks": 128, "block_bytes": 1 << 20}
    spread = {f"{way}_ratio_quartiles": [0.7, 0.9] for way in ("put", "get")}
    return remote._report({**rates, **ratios, **spread})


def _chat() -> Report:
    recalled = {"device": 100, "host": 300, "computed": 100}
    answer = Answer(500, recalled, tuple(range(24)), (), "", 0.5, 1.0)
    figures = serving._figures(Run([answer] * 3, 2.0))
    absent = {"lmcache": "EngineError: LMCache is not installed"}
    return serving._report(
        conversations(3, 1), {"host": figures}, absent, 1 << 20, deployments=DEPLOYMENTS
    )


def _decode() -> Report:
    times = tuple(SECONDS)
    found = DecodeTimes(times, times, times, times, 0.2, 0.25, False, 0.0, {"blocks_selected": 3})
    return decode._report(65536, RetrievalSettings(), found, 2)


def _needle() -> Report:
    settings = RetrievalSettings(init_tokens=128, local_tokens=256, dense_boundary=512)
    variants = (DENSE, Variant("retrieval", settings))
    right, replies = (True, False), ("a", "b")
    facts = {"settings": dataclasses.asdict(settings)}
    records = [Record(n, "single", 0.5, "?", ("a",), right, replies) for n in (2048, 8192)]
    return report_of(Results(variants, records, Counter(retrieval=7)), "m", ["single"], facts)


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    pairs = {"off": SECONDS, "on": SECONDS}
    starts = dict.fromkeys(("empty", "ready", "first_find"), SECONDS)
    reports: Mapping[str, Report] = {
        "restore": _restore(),
        "overhead": overhead._report(pairs, pairs, 4096),
        "throttle": throttle._report([throttle.Sample("3 x", 1.0, 2.0, 1.0)], 2048, 1 << 20, 1e8),
        "service": service._report(SECONDS, [(1e9, 2e9)], starts, 1000),
        "remote": _remote(),
        "chat": _chat(),
        "decode 64K 20%": _decode(),
        "needle": _needle(),
    }
    step = {"command": "kvrecall bench", "took_s": 1.0, "load_before": 0.5}
    results = {
        name: {**step, "bias": "", **machine(), **json.loads(json.dumps(report.figures))}
        for name, report in reports.items()
    }
    facts = {"machine": machine(), "versions": {"vllm": "0.32.0"}, "date": "2026-11-21T17:00"}
    return {**facts, "results": results}


def test_tables_show_what_was_measured(run: dict[str, Any]) -> None:
    shown = {name: "\n".join(TABLES[name](run)) for name in TABLES}
    assert "| host | 100.0 | 100.0 | 100.0 | 1.25 | 100 |" in shown["restore"]
    assert "| kvrecall: host | 2 | 750 | 80% | 0.50 | 0.50 | 0.50 |" in shown["chat"]
    assert "Left out: lmcache: EngineError: LMCache is not installed" in shown["chat"]
    assert "| kvrecall: host | 80% | 0.50 s | 0.50 s | 750 |" in shown["summary"]
    assert "| kvrecall：主机内存 | 80% | 0.50 s | 0.50 s | 750 |" in shown["summary-zh"]
    assert "| 65,536 | 20% | 25.0% | 200.00 |" in shown["decode"]
    assert "| per cent right | 2,048 tokens | 8,192 tokens |" in shown["needle"]
    bare = "to Mooncake's bare client"
    assert f"| remote tier puts, {bare} | 0.80 | at least 0.9 | **missed** |" in shown["pool"]
    assert f"| remote tier gets, {bare} | 0.98 | at least 0.9 | met |" in shown["pool"]
    assert "worst median | 0.50 | at most 1.1 | met |" in shown["pool"]
    assert "`make bench` measures it" in shown["tiers"]


def test_results_of_another_machine_are_told_apart(run: dict[str, Any]) -> None:
    elsewhere = {**run["results"]["restore"], "cpu": "Another Processor", "cores": 64}
    added = {**run, "results": {**run["results"], "restore": elsewhere}}
    assert "On another machine (Another Processor, 64 cores): `restore`." in list(
        TABLES["machine"](added)
    )
    assert "Machine: Another Processor, 64 cores, no GPU" in "\n".join(TABLES["first-token"](added))
    assert not any("another machine" in line for line in TABLES["machine"](run))


def test_plots_are_drawn_of_it(run: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = write_plots(run, tmp_path)
    assert {path.stem for path in drawn} == {"chat", "restore", "retrieval"}
