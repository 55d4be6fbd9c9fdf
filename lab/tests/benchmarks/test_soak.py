"""``kvrecall bench soak``: a few seconds of it, on a disk that is full soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_commands import figures_of

from kvrecall_lab.bench import soak


def test_nothing_is_lost_or_wrong_while_blocks_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr(soak, "_DISK_BLOCKS", 512)
    path = str(tmp_path / "new")
    figures = figures_of("soak", "--minutes", "0.15", "--rate", "300", "--path", path)
    assert figures["wrong"] == figures["corrupt"] == figures["errors"] == figures["lost"] == 0
    assert figures["blocks_after_reopening"] > 0
    assert figures["blocks_evicted"] > 0
    assert figures["blocks_recalled"] > 0
    assert len(figures["rss_mib"]) == len(figures["find_us_a_block"]) == 7
