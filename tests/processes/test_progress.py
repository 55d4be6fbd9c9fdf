"""Progress output of laboratory commands."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from kvrecall.processes import progress
from kvrecall.processes.progress import ProgressLines
from kvrecall.testing.blocks import wait_until

_SCRIPT = """
from kvrecall.processes.progress import ProgressLines
say = ProgressLines("try")
with say.alive():
    say("[one] of two")
    say.now("waiting")
    say("two of two")
print("{}")
"""


def test_each_line_tells_the_time_since_the_command_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say = ProgressLines("try")
    with say.alive():
        say("one")
    say("  two")
    found = capsys.readouterr()
    assert found.out == ""
    assert re.fullmatch(r"try: \d+:\d\d one\ntry: \d+:\d\d   two\n", found.err)


def test_silence_is_broken_by_what_is_done_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SILENCE_S", 0.0)
    said = []

    def was_said() -> bool:
        said.append(capsys.readouterr().err)
        return "... asking the server" in "".join(said)

    say = ProgressLines("try")
    with say.alive():
        say("a line")
        say.now("asking the server")
        wait_until(was_said)


def test_on_a_terminal_lines_stay_and_standard_output_is_clean() -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, stderr=theirs, check=True
        )
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == b"{}\n"
    printed = re.findall(r"try: \d+:\d\d ([^\r\n]*)", shown)
    assert [line.strip() for line in printed] == ["[one] of two", "two of two"]
