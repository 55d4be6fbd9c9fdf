"""docs/architecture.svg shows the rooms and imports that there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .pages import ROOT


def test_the_picture_shows_the_imports(tmp_path: Path) -> None:
    drawn = tmp_path / "architecture.svg"
    subprocess.run([sys.executable, ROOT / "scripts" / "picture", drawn], check=True)
    committed = (ROOT / "docs" / "architecture.svg").read_text()
    assert drawn.read_text() == committed, "draw it again: .venv/bin/python scripts/picture"
