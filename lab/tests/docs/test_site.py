"""The documents: they build, their links lead somewhere, and the commands in them exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
import threading
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server.live import browsing
from support.commands import ran

from kvrecall_lab.reference import commands as reference

from .pages import FENCE, PAGES, ROOT, all_commands, anchors, commands

_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")


def ours(program: str) -> list[tuple[str, str]]:
    return [(c.where, c.line) for c in all_commands() if c.words[0] == program]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The (sub-)command that ``kvrecall WORDS`` runs, and the words left for it."""
    known = known_commands()
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    for length in range(len(named), 0 if named else -1, -1):
        if found := known.get(" ".join(["kvrecall", *named[:length]])):
            return found, words[length:]
    raise AssertionError(f"there is no command {' '.join(words[:2])}")


@cache
def known_commands() -> dict[str, Any]:
    return dict(reference.commands())


def test_a_command_in_the_documents_is_one_that_exists() -> None:
    assert len(ours("kvrecall")) > 5
    for page, line in ours("kvrecall"):
        command, words = command_of(shlex.split(line.partition("|")[0])[1:])
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        given = [word.partition("=")[0] for word in words[: [*words, "--"].index("--")]]
        unknown = {word for word in given if word.startswith("-")} - known - {"--help"}
        assert not unknown, f"{page}: {line}: no such option"


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


def test_a_code_block_says_its_language() -> None:
    """In bash there are commands, a register of which says what runs them; else there are none."""
    bare = [
        (page.name, text[:60])
        for page in PAGES
        for language, text in FENCE.findall(page.read_text())
        if not language
    ]
    assert not bare


def test_links_between_files_lead_somewhere() -> None:
    """mkdocs checks headings between the pages of the site; here those that other files link to,
    and the pages that the code names."""
    broken = []
    for page in PAGES:
        text = page.read_text()
        broken += [(page.name, t) for t in _LINK.findall(text) if not (page.parent / t).exists()]
        if page.parent == ROOT:
            linked = re.findall(r"\]\(([^)#:\s]+\.md)#([\w-]+)\)", text)
            broken += [one for one in linked if one[1] not in anchors(ROOT / one[0])]
    for module in (ROOT / "src").rglob("*.py"):
        named = re.findall(r"\b((?:docs|archive)/[\w/.-]+\.md)", module.read_text())
        broken += [(module.name, t) for t in named if not (ROOT / t).exists()]
    assert not broken


_HELD = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_what_retrieval_reaches_is_held_by_tests_that_exist() -> None:
    """Every row of the table of what it serves and refuses names them."""
    part = (ROOT / "docs/retrieval.md").read_text().partition("\n## What it refuses\n")[2]
    rows = [line for line in part.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    for row in rows[1:]:
        held = _HELD.findall(row)
        assert held, f"no test is named: {row[:60]}"
        for file, name in held:
            texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
            assert any(f"\ndef {name}(" in text for text in texts), f"no {name} in {file}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning; with --quiet mkdocs counts none."""
    folder = tmp_path_factory.mktemp("site")
    done = ran(sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_site_is_in_its_navigation(site: Path) -> None:
    """mkdocs mentions a page without a place there, and builds on."""
    named = set(re.findall(r"[\w./-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages == named
    assert (site / "index.html").exists()


def test_a_reader_finds_a_chinese_word(site: Path) -> None:
    """In the browser, by typing it: words are segmented, because a sentence without spaces would be
    one word that no reader types."""
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browsing() as chromium:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page = chromium.new_page()
            page.set_default_timeout(300_000)  # other engines may keep both cores busy
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.locator(".md-search__input").click()
            page.locator(".md-search-result__meta", has_text="Type to start").wait_for()
            page.locator(".md-search__input").fill("前缀缓存")
            page.locator(".md-search__input").press("End")  # the site hears keys, not the text
            page.locator(".md-search-result__item a[href*='mindie.zh-CN/']").first.wait_for()
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("script", ["picture", "chart"])
def test_a_picture_shows_what_there_is(script: str, tmp_path: Path) -> None:
    into = tmp_path / ("architecture.svg" if script == "picture" else "")
    subprocess.run([sys.executable, ROOT / "scripts" / script, into], check=True)
    for drawn in tmp_path.iterdir():
        (committed,) = (ROOT / "docs").rglob(drawn.name)
        assert drawn.read_text() == committed.read_text(), f"run .venv/bin/python scripts/{script}"
