"""What benchmarks print."""

from __future__ import annotations

import json

import pytest

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
