"""Names and phrases: a class name means one thing, and sentences are plain English."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvrecall"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

MOST_WORDS = 40
"""Of the glossary."""

BANNED = (
    "a part of the work more",
    "by turns",
    "for who hosts",
    "has none any more",
    "held by tests",
    "is to be had",
    "mended",
    "nobody",
    "nothing of it must be",
    "somebody",
    "stops to be",
    "was not to be had",
    "what an h200 said",
    "whoever",
)
"""Phrases that no engineer at vLLM or foyer would write. Say who does what, in active voice."""

BANNED_IN_MESSAGES = (
    "all the same",
    "any more",
    "begun",
    "hanging",
    "has not an?",
    "hold, too",
    "nothing was said",
    "one a line",
    "otherwise than",
    "so many",
    "was said",
    "(is|are|was|were|be) told",
    "theirs",
    "wants an?",
)
"""The same of help texts, log lines and errors; patterns."""


def test_a_class_name_is_there_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(module.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


@pytest.mark.parametrize("phrase", BANNED)
def test_no_page_and_no_module_has(phrase: str) -> None:
    words = re.compile(r"\b" + phrase.replace(" ", r"\s+") + r"\b", re.IGNORECASE)
    found = [
        str(path.relative_to(ROOT)) for path in (*MODULES, *PAGES) if words.search(path.read_text())
    ]
    assert found == []


def test_no_message_has() -> None:
    words = re.compile(rf"\b({'|'.join(BANNED_IN_MESSAGES)})\b", re.IGNORECASE)
    found = []
    for module in MODULES:
        nodes = list(ast.walk(ast.parse(module.read_text())))
        said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        found += [
            f"{module.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in said and " " in node.value and words.search(node.value)
        ]
    assert found == []


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    glossary = text.partition("## Glossary")[2].partition("## ")[0]
    rows = [line for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert 20 < len(rows) <= MOST_WORDS
