"""The lines that docs/troubleshooting.md and upgrade.md quote are those that the code writes."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.commands import ran

from .pages import FENCE, ROOT
from .scenes import QWEN

PAGE = ROOT / "docs" / "troubleshooting.md"
PAGES = (PAGE, ROOT / "docs" / "upgrade.md")
_ENOUGH = 20  # letters of a message that are always the same; shorter ones fit anything
_PLACE = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[sdifgr]")


def quoted() -> list[str]:
    """Lines in blocks of text, except replies and tables."""
    blocks = [
        text
        for page in PAGES
        for language, text in FENCE.findall(page.read_text())
        if language == "text"
    ]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith((" ", '"recall"'))]


def pattern(node: ast.expr) -> str:
    """A pattern of a string in the code, with wildcards for its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ".*?".join(map(re.escape, _PLACE.split(node.value)))
    return ".*?"


def strings(tree: ast.AST) -> Iterator[ast.expr]:
    """The outermost strings: the pieces of an f-string are not messages."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr) or (
            isinstance(child, ast.Constant) and isinstance(child.value, str)
        ):
            yield child
        else:
            yield from strings(child)


@cache
def messages() -> list[re.Pattern[str]]:
    found = set()
    for path in (ROOT / "src" / "kvrecall").rglob("*.py"):
        found |= {pattern(node) for node in strings(ast.parse(path.read_text()))}
    fixed = (text for text in found if len(text.replace(".*?", "").replace("\\", "")) >= _ENOUGH)
    return [re.compile(text) for text in fixed if "\n" not in text]


def test_a_quoted_line_is_one_that_the_code_writes() -> None:
    unknown = [line for line in quoted() if not any(one.search(line) for one in messages())]
    assert not unknown, "quote what it says now"
    assert not any(one.search("disk tier: the disk is on fire") for one in messages())


def test_the_script_prints_what_differs(tmp_path: Path) -> None:
    """Of two namespaces, as ``kvrecall pool ls --json`` lists them."""
    (script,) = (text for language, text in FENCE.findall(PAGE.read_text()) if language == "python")
    rows = [
        {"parts": dict(QWEN.parts, block_size=size, dtype="bfloat16")} for size in ("128", "64")
    ]
    (tmp_path / "namespaces.json").write_text(json.dumps({"rows": rows}))
    done = ran(sys.executable, "-c", script, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["block_size", "128", "64"]
