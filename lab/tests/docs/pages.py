"""The documents, and the command lines in their code blocks."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("lab/**/*.md")])
SHELL = "bash"
"""The language of blocks that hold commands; every block has one."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
_WORD = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line as a page has it, continued lines and comment included.

    ``section``: the text from the heading above it to the next heading."""

    page: Path
    section: str
    text: str

    @property
    def line(self) -> str:
        """In one line, without its comment."""
        return uncommented(self.text)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def shape(self) -> str:
        return shape_of(self.words)

    @property
    def where(self) -> str:
        return str(self.page.relative_to(ROOT))


def shape_of(words: list[str]) -> str:
    """Program and sub-command: ``kvrecall pool ls``, ``make test``, ``python -m a.module``.

    Variables before the program are left out. A package that pip shall install is none of it."""
    while "=" in words[0]:
        words = words[1:]
    program, *rest = words
    if program == "pip":
        rest = rest[:1]
    if program == "python":
        program, rest = " ".join(words[:3]), words[3:]
    shape = [program]
    for word in rest:
        if not _WORD.fullmatch(word):
            break
        shape.append(word)
    return " ".join(shape)


def uncommented(text: str) -> str:
    """Without what follows a # outside of quotes, in one line."""
    quote = ""
    for at, letter in enumerate(text):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter == "#" and text[at - 1].isspace():
            text = text[:at]
            break
    return text.replace("\\\n", " ").strip()


@cache
def commands(page: Path) -> tuple[Command, ...]:
    """The command lines in a page's code blocks."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        if fence[1] == SHELL:
            section = _section(text, fence.start())
            found += [Command(page, section, each) for each in _lines(fence[2])]
    return tuple(found)


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands(page)]


def named_in_text(page: Path) -> Iterator[str]:
    """The shapes of our own commands that its running text names; ``a|b`` stands for two."""
    for span in _SPAN.findall(FENCE.sub("", page.read_text())):
        program, *words = span.split()
        if program in ("kvrecall", "make") and words:
            for choice in itertools.product(*(word.split("|") for word in words)):
                yield shape_of([program, *choice])


def _lines(block: str) -> Iterator[str]:
    """Each command of a block, however many lines it takes."""
    text = ""
    for line in block.splitlines():
        text += f"{line}\n"
        if line.endswith("\\") or _is_open(text):
            continue
        if uncommented(" " + text):
            yield text.strip()
        text = ""
    assert not text, f"a quotation is not closed: {text}"


def _is_open(text: str) -> bool:
    try:
        shlex.split(uncommented(text))
    except ValueError:
        return True
    return False


def _section(text: str, at: int) -> str:
    """The section of a page that a place is in. Comments in code blocks are no headings."""
    plain = FENCE.sub(lambda fence: re.sub(r"(?m)^#", " ", fence[0]), text)
    starts = [0, *(heading.start() for heading in _HEADING.finditer(plain))]
    ends = [*starts[1:], len(text)]
    return next(text[a:b] for a, b in zip(starts, ends, strict=True) if a <= at < b)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}
