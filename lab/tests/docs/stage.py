"""A folder in which the commands of a page run one after the other, as for a reader."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvrecall.processes.ports import free_port
from kvrecall.testing import wait_until

from .pages import ROOT

_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d+")
_LIMIT_S = 300


def environment() -> dict[str, str]:
    """As in a checkout after ``. .venv/bin/activate``, with the modules of this one; not as below
    the ``make`` that may run these tests."""
    paths = [str(ROOT / "src"), str(ROOT / "lab"), os.environ.get("PYTHONPATH", "")]
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "COLUMNS": "200",
    }
    given = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return {**given, **own}


class Stage:
    """Use as a context manager: leaving it ends the servers that were started, in order."""

    def __init__(self) -> None:
        self._end = ExitStack()
        self._ports: dict[str, int] = {}
        self._servers: dict[str, tuple[subprocess.Popen[str], Path]] = {}

    def __enter__(self) -> Stage:
        name = self._end.enter_context(tempfile.TemporaryDirectory(prefix="kvr-"))
        self.folder = Path(name)  # short: a socket's path may have 107 bytes only
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        try:
            for shape in list(self._servers):
                self.stop(shape, judged=failure is None)
        finally:
            self._end.close()

    def port(self, number: int | str) -> int:
        """A free port, always the same one in place of a documented ``number``."""
        return self._ports.setdefault(str(number), free_port())

    def uses(self, number: int | str) -> bool:
        """Whether a port stands for ``number`` already."""
        return str(number) in self._ports

    def keep(self, end: Callable[[], object]) -> None:
        """Adds a context manager that ends with the stage."""
        self._end.callback(end)

    def ported(self, line: str) -> str:
        return _PORT.sub(lambda found: str(self.port(found[0])), line)

    def run(self, line: str) -> str:
        """Runs a line, which must exit with 0. Returns its output, both streams."""
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        assert done.returncode == 0, f"{line}: exit status {done.returncode}\n{done.stdout[-3000:]}"
        return done.stdout

    def start(self, shape: str, line: str, ready: str) -> str:
        """Starts a server, in place of an earlier one of that shape, until it says ``ready``."""
        self.stop(shape)
        log = self.folder / f"{shape.replace(' ', '-')}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=environment() | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._servers[shape] = process, log
        wait_until(lambda: ready in log.read_text() or process.poll() is not None, _LIMIT_S)
        said = log.read_text()
        assert ready in said, f"{line}: ended with {process.poll()}\n{said[-3000:]}"
        return said

    def stop(self, shape: str, judged: bool = True) -> None:
        """Ends a server, if there is one; if ``judged`` it must then end in order: with 0, or with
        the signal, which uvicorn raises again when it has ended."""
        if shape not in self._servers:
            return
        process, log = self._servers.pop(shape)
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        in_order = status in (0, -signal.SIGTERM)
        assert in_order or not judged, f"{shape}: ended with {status}\n{log.read_text()[-3000:]}"
