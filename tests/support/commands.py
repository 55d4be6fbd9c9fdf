"""``kvrecall`` commands without the rights that root has over files, each in a child of a process
that has imported the command line already, so that one takes milliseconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_PROGRAM = """
import ctypes, gc, importlib, json, os, signal, sys, tempfile
from kvrecall import cli

for module in sys.argv[1:]:
    importlib.import_module(module)

class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

class Rights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

none = (Rights * 2)()
assert ctypes.CDLL(None).capset(ctypes.byref(Header(0x20080522, 0)), none) == 0

def run(words, folder):
    signal.alarm(60)
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    sys.argv = ["kvrecall", *words]
    try:
        cli.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

gc.freeze()  # the end of a child would copy the memory of all that is imported
for line in sys.stdin:
    words, folder = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            run(words, folder)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        print(json.dumps([status, out.read().decode(), err.read().decode()]), flush=True)
"""
_ROOMS = (
    "kvrecall.pool_cli kvrecall.server.launch kvrecall.server.mindie.planner "
    "kvrecall.router.router kvrecall.simulate.cli kvrecall.plan.cli kvrecall.doctor.cli "
    "kvrecall.bench.cli"
).split()


KVRECALL = Path(sys.executable).parent / "kvrecall"


def ran(*command: str | bytes | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, and what it wrote. ``how``: as of subprocess.run."""
    return subprocess.run(command, capture_output=True, text=True, **how)


@dataclass(frozen=True, slots=True)
class Done:
    status: int
    out: str
    err: str


class Commands:
    """Runs commands in ``folder``. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *_ROOMS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: Sequence[str]) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(words), str(self._folder)]) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
