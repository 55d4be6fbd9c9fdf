"""All benchmarks in one run: failures are recorded, and documents state the measured figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrecall.bench.cli import COMMANDS
from kvrecall_lab.bench.suite import LATEST, run_all
from kvrecall_lab.bench.tables import PAGES, TABLES, filled, names_in, read_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    return read_run(ROOT / LATEST)


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    out = tmp_path / "results" / "run.json"
    steps = (("disk --no-such-option", 60), ("service", 0.1), ("lookup", 120))
    said: list[str] = []
    assert run_all(steps, out, said.append) == 2
    results = json.loads(out.read_text())["results"]
    assert results["disk"]["error"] == "exit status 2"
    assert any("no-such-option" in line for line in results["disk"]["said"])
    assert results["service"]["error"] == "not done after 0 s"
    assert results["lookup"]["median_us"]["find_host"] > 0
    assert results["lookup"]["bias"] == COMMANDS["lookup"][2]
    assert {"command", "took_s", "load_before", "commit", "cpu"} <= results["lookup"].keys()
    assert any("2 of 3 failed" in line for line in said)
    assert run_all(steps[2:], out, said.append, add=True) == 0
    assert json.loads(out.read_text())["results"].keys() == results.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_was_measured(page: str, run: dict[str, Any]) -> None:
    text = (ROOT / page).read_text()
    assert names_in(text)
    assert filled(text, run) == text, "publish it"


def test_every_table_is_shown() -> None:
    shown = {name for page in PAGES for name in names_in((ROOT / page).read_text())}
    assert shown == set(TABLES)
