"""docs/architecture.svg shows the rooms and imports that there are, README's chart the results."""

import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT


@pytest.mark.parametrize("script", ["picture", "chart"])
def test_a_picture_shows_what_there_is(script: str, tmp_path: Path) -> None:
    into = tmp_path / ("architecture.svg" if script == "picture" else "")
    subprocess.run([sys.executable, ROOT / "scripts" / script, into], check=True)
    for drawn in tmp_path.iterdir():
        (committed,) = (ROOT / "docs").rglob(drawn.name)
        assert drawn.read_text() == committed.read_text(), f"run .venv/bin/python scripts/{script}"
