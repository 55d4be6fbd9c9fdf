"""Commands of benchmarks, demo and checks: their progress, and children that end with them.

A benchmark or test that dies of ``kill -9`` shuts nothing down; its children detect its death
themselves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import typer

from kvrecall.errors import KvrecallError, status_of

_OURS = (
    "import sys; from importlib import import_module;"
    "from kvrecall.processes.command import end_with; end_with(int(sys.argv.pop(1)));"
    "import_module(sys.argv.pop(1)).main()"
)
_PROGRAM = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
_LOOK_S = 0.5
_GRACE_S = 20.0
_SILENCE_S = 10.0


def kvrecall(*words: str) -> list[str]:
    """A command line that runs ``kvrecall WORDS`` of this installation until it ends, or this
    process does."""
    return own("kvrecall.cli", *words)


def own(module: str, *words: str) -> list[str]:
    """The same of the ``main`` of another module."""
    return [sys.executable, "-c", _OURS, str(os.getpid()), module, *words]


def as_child(*command: str) -> list[str]:
    """A command line that runs ``command`` until it ends, or the thread that starts it does: for
    third-party programs. Linux (PR_SET_PDEATHSIG)."""
    return [sys.executable, "-S", "-c", _PROGRAM, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Watches ``parent``, which started this process: when it has ended, this process gets SIGTERM;
    20 seconds later it and its process group are killed. Returns at once."""
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class ProgressLines:
    """Progress of a command, on standard error: lines with the time since it began."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._began = self._said = time.monotonic()
        self._line = ""
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            self._now(line)
            self._print(line)

    def now(self, line: str) -> None:
        """Sets the current activity, which is printed only if it takes long."""
        with self._lock:
            self._now(line)

    def _now(self, line: str) -> None:
        self._line = line.strip().partition("\n")[0]

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """The command begins here. Until the end of the block a line every ten seconds without
        other output says what it does."""
        self._began = self._said = time.monotonic()
        self._line = "working"
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(1.0):
            with self._lock:
                if time.monotonic() - self._said >= _SILENCE_S:
                    self._print(f"  ... {self._line}")

    def _print(self, line: str) -> None:
        self._said = time.monotonic()
        seconds = int(self._said - self._began)
        text = f"{self._command}: {seconds // 60}:{seconds % 60:02d} {line}"
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def command_folder(
    command: str, keep: bool = False, keep_failed: bool = True, large: Sequence[str] = ()
) -> Iterator[Path]:
    """A folder for a run of ``command``. An error within becomes one line and an exit status.

    Removes the folder at the end, unless ``keep``, or ``keep_failed`` if the run did not end with 0
    or Ctrl-C; then without the ``large`` files.
    """
    unwind_on_signals()
    progress = ProgressLines(command)
    folder = Path(tempfile.mkdtemp(prefix=f"kvrecall-{command}-"))
    failed = True
    try:
        yield folder
        failed = False
    except typer.Exit as end:
        failed = end.exit_code != 0
        raise
    except KvrecallError as error:
        progress(f"failed: {error}")
        raise typer.Exit(status_of(error)) from error
    except KeyboardInterrupt:
        progress("stopped")
        failed = False
        raise typer.Exit(130) from None
    finally:
        if keep:
            progress(f"everything is kept in {folder}")
        elif failed and keep_failed:
            for name in large:
                shutil.rmtree(folder / name, ignore_errors=True)
            progress(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def unwind_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that processes are ended and folders removed,
    and SIGINT raise KeyboardInterrupt even if a shell ignores it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
