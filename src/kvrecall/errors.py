"""Errors a person can act on: each names the thing, what is wrong with it and the cure.

Expected outcomes (a miss, a refused reservation, a pending promotion) are values, not errors; an
exception here means a wrong configuration, a broken medium or a bug.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class KvrecallError(Exception):
    """Base of all errors raised on purpose by kvrecall."""


class ConfigError(KvrecallError):
    """A setting is missing, unknown, of the wrong type or out of range."""


class TierError(KvrecallError):
    """A tier cannot be opened or used (unwritable path, no room, held by another process)."""


class EngineError(KvrecallError):
    """The engine cannot be served by kvrecall as configured (unsupported model or version)."""


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Ends a command that raises a KvrecallError with one line on stderr and status 1; 2 if it is
    a ConfigError."""
    try:
        yield
    except KvrecallError as error:
        print(f"kvrecall: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error
