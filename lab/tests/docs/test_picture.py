"""docs/architecture.svg shows the rooms and imports that there are, README's chart the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .pages import ROOT


def test_the_pictures_show_what_there_is(tmp_path: Path) -> None:
    for script, into, names in (
        ("picture", tmp_path / "architecture.svg", ["architecture.svg"]),
        ("chart", tmp_path, ["images/conversations.svg", "images/conversations.zh-CN.svg"]),
    ):
        subprocess.run([sys.executable, ROOT / "scripts" / script, into], check=True)
        for name in names:
            drawn, committed = tmp_path / Path(name).name, ROOT / "docs" / name
            assert drawn.read_text() == committed.read_text(), (
                f"run .venv/bin/python scripts/{script}"
            )
