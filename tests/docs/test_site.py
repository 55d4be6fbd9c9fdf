"""The documents: they build, their links lead somewhere, and the commands in them exist."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvrecall import cli
from kvrecall.lab.bench import cli as bench

from .pages import FENCE, PAGES, ROOT, all_commands, commands

_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")


def ours(program: str) -> list[tuple[str, str]]:
    return [(c.where, c.line) for c in all_commands() if c.words[0] == program]


def click_command(words: list[str]) -> tuple[Any, list[str]]:
    """The (sub-)command that ``kvrecall WORDS`` runs, and the words left for it."""
    top: Any = typer.main.get_command(cli.app)
    if words and words[0] in cli._ROOMS:
        module = cli._ROOMS[words[0]][0]
        top, words = typer.main.get_command(importlib.import_module(module).app), words[1:]
        if module == bench.__name__ and words and words[0] in bench.COMMANDS:
            return typer.main.get_command(bench.benchmark(words[0])), words[1:]
    while words and words[0] in getattr(top, "commands", {}):
        top, words = top.commands[words[0]], words[1:]
    alone = not hasattr(top, "commands") or top.invoke_without_command
    assert alone, f"there is no command {words[:1]}"
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
        return {command.line for command in commands(page)}

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_code_block_says_its_language(page: Path) -> None:
    """In bash there are commands, a register of which says what runs them; else there are none."""
    assert not [text[:60] for language, text in FENCE.findall(page.read_text()) if not language]


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
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
