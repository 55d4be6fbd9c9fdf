"""All benchmarks in one run: failures are recorded, and documents state the measured figures."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest

from kvrecall.bench.report import BIAS
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.plots import write_plots
from kvrecall_lab.bench.suite import LATEST, Step, run_all
from kvrecall_lab.bench.tables import PAGES, PLOTS, TABLES, filled, names_in, read_run

ROOT = Path(__file__).parents[3]
PAGE = PurePosixPath("docs/page.md")


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "results" / "run.json"
    steps = (
        Step("wrong", ("lookup", "--no-such-option"), 60),
        Step("late", ("service",), 0.1),
        Step("absent", ("replay", "trace"), 60, needs=tmp_path / "trace"),
        Step("lookup", ("lookup",), 120),
    )
    said: list[str] = []
    assert run_all(steps, out, "test", said.append) == 2
    results = json.loads(out.read_text())["results"]
    assert results["wrong"]["error"] == "exit status 2"
    assert any("no-such-option" in line for line in results["wrong"]["said"])
    assert results["late"]["error"] == "not done after 0 s"
    assert results["absent"]["error"] == f"{tmp_path / 'trace'} is not there"
    assert results["lookup"]["median_us"]["find_host"] > 0
    assert results["lookup"]["bias"] == BIAS["lookup"]
    assert {"command", "took_s", "load_before", "commit", "cpu"} <= results["lookup"].keys()
    assert any("2 of 4 failed" in line for line in said)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_says_what_was_measured(page: PurePosixPath) -> None:
    text = (ROOT / page).read_text()
    assert names_in(text)
    assert filled(text, read_run(ROOT / LATEST), page) == text, "publish it"


def test_every_table_is_shown() -> None:
    shown = {name for page in PAGES for name in names_in((ROOT / page).read_text())}
    assert shown == set(TABLES)


def test_a_page_that_asks_for_an_unknown_table_is_refused() -> None:
    text = "<!-- bench:nothing -->\n<!-- /bench:nothing -->"
    with pytest.raises(KvrecallError, match="no table is named 'nothing'; known: machine"):
        filled(text, {}, PAGE)


def test_plots_of_what_there_is_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = read_run(ROOT / LATEST)
    drawn = write_plots(run, tmp_path)
    assert {path.name for path in drawn} <= {path.name for path in (ROOT / PLOTS).glob("*.png")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    run["results"] = {name: {"error": "late"} for name in run["results"]}
    assert write_plots(run, tmp_path / "none") == []
