"""Tables and headings of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without columns that are empty in every row; empty without rows."""
    cells = [[cell(text) for text in row] for row in rows]
    kept = [place for place in range(len(titles)) if any(row[place] for row in cells)]
    if not kept:
        return ""
    lines = [[titles[place] for place in kept], ["---"] * len(kept)]
    lines += [[row[place] for place in kept] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """``text`` in one line, with angle brackets outside code spans escaped."""
    spans = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", r"\|"))
    return "".join(s if s.startswith("`") else s.replace("<", "&lt;") for s in spans)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """``text`` with a full stop behind, and a capital in front if it begins with a plain word."""
    text = text.strip()
    if re.match(r"[a-z]+[ ,:;]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", ":", "?", "]")) or not text else f"{text}."


def plain(text: str) -> str:
    """A docstring's text as Markdown: double backticks become single ones, lines are joined."""
    return " ".join(text.replace("``", "`").split())
