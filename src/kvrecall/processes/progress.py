"""Progress of a command, on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_SILENCE_S = 10.0


class ProgressLines:
    """Prints lines with the time since the command began. Leaves standard output clean."""

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
    def alive(self, beats: bool = True) -> Iterator[None]:
        """The command begins here. Until the end of the block a line every ten seconds without
        other output says what it does, if ``beats``."""
        self._began = self._said = time.monotonic()
        self._line = "working"
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), name="progress", daemon=True)
        if beats:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if beats:
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
