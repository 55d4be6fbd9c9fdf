"""What benchmarks print, and measure."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvrecall.bench import cli
from kvrecall.bench.model import Texts, fast_dtype
from kvrecall.bench.pool import measure_disk, measure_lookup
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


@pytest.mark.parametrize(
    ("flags", "machine", "dtype"),
    [
        ("fpu avx512f avx512_vnni", "x86_64", "float32"),
        ("fpu avx512f avx512_bf16", "x86_64", "bfloat16"),
        ("fpu amx_bf16", "x86_64", "bfloat16"),
        ("fpu", "aarch64", "bfloat16"),
    ],
)
def test_single_precision_where_bfloat16_is_emulated(
    flags: str, machine: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nflags\t: {flags}\n")
    assert fast_dtype(file) == dtype
    assert fast_dtype(tmp_path / "absent") == "bfloat16"


def test_lookup_figures() -> None:
    figures: Any = measure_lookup(100, repeats=3).figures
    json.dumps(figures)
    timings = figures["median_us"]
    assert set(timings) >= {"find_host", "find_disk", "acquire_release_host", "reserve_64"}
    assert all(value > 0 for value in timings.values())


def test_disk_figures(tmp_path: Path) -> None:
    for encrypted in (False, True):
        figures: Any = measure_disk(tmp_path, encrypted, "8MiB", 100_000, repeats=2).figures
        json.dumps(figures)
        assert figures["bytes"] == 81 * 102_400
        assert figures["sealed"] is encrypted
        assert list(tmp_path.iterdir()) == []


def test_compressed_disk_figures(tmp_path: Path) -> None:
    figures: Any = measure_disk(tmp_path, False, "8MiB", 100_000, 1, "zstd").figures
    assert 0.5 < figures["compressed_to"] < 0.9


@pytest.mark.long
def test_every_part_is_measured() -> None:
    small = "--blocks 1000 --repetitions 1".split()
    done = CliRunner().invoke(cli.app, ["service", *small, "--json"])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["lookup_s"]["n"] == 100
    assert figures["restore_to_plain"]["n"] == 2
    assert figures["restore_to_plain"]["p50"] > 0
    assert figures["start_s"]["first_find"]["p50"] >= figures["start_s"]["ready"]["p50"] > 0
    assert done.stderr.count("bench: ") >= 3
    assert len(figures["rows"]) >= 7
