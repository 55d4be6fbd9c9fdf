"""Prose that lies on every machine with Python, as a second kind of filler for training.

`pydoc_data.topics` and the docstrings of the standard library, PSF licence. It differs from
one Python version to the next, so the bench uses the grammar of `filler.py` instead.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_DIGITS = re.compile(r"\d{3,}")


def _docstrings(limit: int) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py"))[:limit]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def prose(limit: int = 400) -> list[str]:
    """Sentences of 20 to 300 characters, white space made plain, no number of three digits."""
    from pydoc_data import topics

    texts = [*topics.topics.values(), *_docstrings(limit)]
    found: list[str] = []
    for text in texts:
        for line in re.split(r"(?<=[.:!?])\s+", " ".join(text.split())):
            if 20 <= len(line) <= 300 and not _DIGITS.search(line):
                found.append(line)
    return found


def endless(rng: random.Random, lines: list[str], run: int = 8) -> Iterator[str]:
    """Runs of `run` consecutive sentences from random places."""
    while True:
        start = int(rng.random() * max(1, len(lines) - run))
        yield from lines[start : start + run]
