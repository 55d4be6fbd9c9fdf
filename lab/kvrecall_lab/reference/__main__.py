"""Writes the generated pages of the folder ``docs``, or of the given one."""

from __future__ import annotations

import sys
from pathlib import Path

from kvrecall_lab.reference.pages import PAGES

if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for page in PAGES:
        if page.write(docs):
            print(f"written: {docs / page.path}")
