"""A benchmark's children end with it, also when it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

_OURS = """
from pathlib import Path
from kvrecall.processes.service import ServiceProcess
service = ServiceProcess(Path({folder!r}) / "pool", 16 << 20, 64 << 20)
service.start()
print(service.pid, flush=True)
input()
"""
_FOREIGN = """
import subprocess
from kvrecall.processes.command import as_child
process = subprocess.Popen(as_child("sleep", "1000"))
print(process.pid, flush=True)
input()
"""


@pytest.mark.parametrize("program", [_OURS, _FOREIGN], ids=["ours", "foreign"])
def test_a_child_ends_with_a_parent_that_is_killed(program: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", program.format(folder=str(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    parent.communicate()
    assert _ended(child, 60.0), child


def _ended(process: psutil.Process, seconds: float) -> bool:
    """Whether it ends within that time; a zombie has ended too."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
