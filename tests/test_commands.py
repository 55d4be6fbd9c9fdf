"""The progress bar of commands."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

_SCRIPT = """
import sys, threading
from rich.progress import Progress
from kvrecall import commands
started, start = threading.Event(), Progress.start
Progress.start = lambda bar: (start(bar), started.set())
commands._LONG_S = 0.0
with commands.progress_bar("dropping") as report:
    report(1, 2)
    sys.stderr.isatty() and started.wait()
commands._LONG_S = 3600.0
with commands.progress_bar("soon done"):
    pass
print("[]")
"""


def test_a_bar_is_on_standard_error_and_only_on_a_terminal() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    ours, theirs = pty.openpty()
    try:
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert shown.stdout == b"[]\n"
    assert ("dropping" in drawn, "soon done" in drawn) == (True, False)
    piped = subprocess.run(command, capture_output=True, check=True)
    assert (piped.stdout, piped.stderr) == (b"[]\n", b"")
