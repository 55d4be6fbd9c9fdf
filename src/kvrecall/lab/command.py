"""What the laboratory's commands share: progress on stderr, and signals that unwind."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType


def progress_of(command: str) -> Callable[[str], None]:
    """Prints lines of ``command`` on stderr, with the time of day."""

    def progress(line: str) -> None:
        print(f"{command}: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    return progress


def unwind_on_signals() -> None:
    """SIGTERM and SIGHUP raise SystemExit, so that processes are ended and folders removed; SIGINT
    raises KeyboardInterrupt also where a shell has it ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
