"""Writes the generated part of a page of the docs."""

from __future__ import annotations

import sys
from pathlib import Path

END = "<!-- end -->"


def begin_of(module: str) -> str:
    """The line that opens the part which ``module`` writes; ``END`` closes it."""
    return f"<!-- begin: written by {module} -->"


def write(arguments: list[str], begin: str, text: str) -> None:
    """Puts ``text`` into the page that ``arguments`` name, between ``begin`` and ``END``; prints it
    if they name none."""
    if not arguments:
        sys.stdout.write(text)
        return
    page = Path(arguments[0])
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n\n{text}\n{END}{after}")
