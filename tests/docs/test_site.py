"""The documents: they build, their links lead somewhere, and the commands in them exist."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvrecall import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("bench/**/*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")


def commands(page: Path) -> Iterator[str]:
    """The command lines in a page's code blocks, continued lines joined, comments cut off."""
    for language, block in _FENCE.findall(page.read_text()):
        if language in ("", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ").split("  #")[0].split("    ")[0].strip()


def ours(program: str) -> list[tuple[str, str]]:
    return [
        (page.name, line)
        for page in PAGES
        for line in commands(page)
        if line.startswith(program + " ") and "'{" not in line
    ]


def click_command(words: list[str]) -> tuple[Any, list[str]]:
    """The (sub-)command that ``kvrecall WORDS`` runs, and the words left for it."""
    top: Any = typer.main.get_command(cli.app)
    if words and words[0] in cli._ROOMS:
        module = cli._ROOMS[words[0]][0]
        top, words = typer.main.get_command(importlib.import_module(module).app), words[1:]
    while words and words[0] in getattr(top, "commands", {}):
        top, words = top.commands[words[0]], words[1:]
    assert not hasattr(top, "commands"), f"there is no command {words[:1]}"
    return top, words


@pytest.mark.parametrize(("page", "line"), ours("kvrecall"))
def test_a_command_in_the_documents_is_one_that_exists(page: str, line: str) -> None:
    command, words = click_command(shlex.split(line.partition("|")[0])[1:])
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    given = [word.partition("=")[0] for word in words[: [*words, "--"].index("--")]]
    unknown = [word for word in given if word.startswith("-") and word not in known]
    assert not unknown, f"{page}: {line}: no such option"


@pytest.mark.parametrize(("page", "line"), ours("make"))
def test_a_make_target_in_the_documents_is_one_that_exists(page: str, line: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert line.split()[1] in targets, f"{page}: {line}"


def test_the_chinese_readme_names_the_commands_and_links_of_the_english_one() -> None:
    """A command, setting or document that comes to one comes to the other."""
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"

    def named(page: Path) -> set[str]:
        programs = ("make ", "kvrecall ", "vllm ", "pip ", "curl ")
        return {line.split("#")[0].strip() for line in commands(page) if line.startswith(programs)}

    assert named(english) == named(chinese)

    def linked(page: Path) -> set[str]:
        pages = {link.replace(".zh-CN", "") for link in _LINK.findall(page.read_text())}
        return {link for link in pages if link.startswith(("docs/", "bench/"))}

    lost = linked(english) - linked(chinese)
    assert not {link for link in lost if link.endswith(".md")}, lost
    settings = re.findall(r"^\| `(\w+)` \|", english.read_text(), re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", chinese.read_text(), re.MULTILINE) == settings


def test_the_documents_do_name_commands() -> None:
    assert len(ours("kvrecall")) > 5
    assert len(ours("make")) > 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    broken = [t for t in _LINK.findall(page.read_text()) if not (page.parent / t).exists()]
    assert not broken


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
