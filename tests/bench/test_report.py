"""What benchmarks print."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvrecall.bench import cli
from kvrecall.bench.model import Texts
from kvrecall.bench.report import Report, percentiles


def test_percentiles() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == {"p10": 1.0, "p50": 2.0, "p90": 3.0, "n": 3}
    assert percentiles([4.0, 1.0])["p50"] == 2.5
    assert percentiles([5.0]) == {"p10": 5.0, "p50": 5.0, "p90": 5.0, "n": 1}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_report_is_a_table_or_one_line_of_json(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("name", ("what", "ms"), (("first", "1.5"),), {"first_ms": 1.5}, ("a note",))
    report.print(as_json)
    lines = capsys.readouterr().out.splitlines()
    if not as_json:
        assert any("a note" in line for line in lines)
        assert not any(line.startswith("{") for line in lines)
        return
    (found,) = map(json.loads, lines)
    assert (found["bench"], found["first_ms"]) == ("name", 1.5)
    assert {"cpu", "cores", "memory_gib", "gpu", "vllm", "kvrecall", "commit"} <= found.keys()


def test_documents_have_their_length_and_share_no_prefix() -> None:
    texts = Texts()
    documents = [texts.document(1000) for _ in range(20)]
    assert {len(document.encode()) for document in documents} == {1000}
    assert len({document[:128] for document in documents}) == 20


def test_a_benchmark_of_the_repository_runs_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        cli.benchmark("replay")
    assert "make setup, then .venv/bin/kvrecall bench replay" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def measure_replay(): 'Mine.'\n")
    (tmp_path / "mine-0.dist-info").mkdir()
    (tmp_path / "mine-0.dist-info" / "entry_points.txt").write_text("[kvrecall.bench]\nreplay=mine")
    (command,) = cli.benchmark("replay").registered_commands
    assert command.callback is not None
    assert command.callback.__doc__ == "Mine."
