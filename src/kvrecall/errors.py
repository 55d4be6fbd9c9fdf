"""Errors that users can act on: each names the subject, the cause and the cure.

Expected outcomes (a miss, a refused reservation, a pending promotion) are values, not errors; an
exception here means a wrong configuration, a broken medium or a bug.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import sys
from collections.abc import Iterator
from enum import IntEnum
from urllib.parse import quote

_HIDDEN = "***"
_SHORTEST = 4  # characters of a secret; hiding a shorter one would garble texts
_REST = r"[^\s'\"]"  # of a word: each pattern takes a letter once, however a text is made
_NAME = r"[^/?#\s'\"@:]*+:(?!\d+/)"
_USER = re.compile(rf"(?<=://)(?:([^/?#\s'\"]+|{_NAME}{_REST}+)@|{_NAME}{_REST}*+)")
_QUERY = re.compile(rf"(://[^\s?#'\"]*+)(?:(\?|#[^\s=?'\"]*+[=?]){_REST}+|{_REST}*+)")
_secrets: set[str] = set()


def hide(secret: str) -> None:
    """No error shows ``secret`` from now on, and no text that ``hidden`` gives."""
    if len(secret) >= _SHORTEST:
        forms = repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe="")
        _secrets.update((secret, *forms))


def hidden(text: str) -> str:
    """``text``, perhaps a library's, without the secrets that are known and without users,
    passwords and queries of URLs."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = _USER.sub(lambda it: f"{_HIDDEN}@" if it[1] else it[0], text)
    return _QUERY.sub(lambda it: f"{it[1]}{it[2][0]}{_HIDDEN}" if it[2] else it[0], text)


class KvrecallError(Exception):
    """Base of all errors raised on purpose by kvrecall. Its text shows no secrets (``hidden``)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(hidden(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(KvrecallError):
    """A setting is missing, unknown, of the wrong type or out of range."""


class TierError(KvrecallError):
    """A tier cannot be opened or used (unwritable path, no room, held by another process)."""


class EngineError(KvrecallError):
    """The engine cannot be served by kvrecall as configured (unsupported model or version)."""


class ExitStatus(IntEnum):
    """The exit status of a command. ``text``: its line in the reference."""

    text: str

    def __new__(cls, number: int, text: str) -> ExitStatus:
        status = int.__new__(cls, number)
        status._value_ = number
        status.text = text
        return status

    OK = 0, "Done; a check found nothing wrong; SIGINT or SIGTERM stopped a server that was ready."
    FAILED = (
        1,
        "The command or a check failed: an unusable path, no service at a socket, an engine that "
        "did not start or died, damaged blocks, an unsuitable machine, a missed benchmark goal.",
    )
    WRONG_SETTINGS = (
        2,
        "An option, an argument, a setting or a file of settings is wrong. Nothing was started "
        "and nothing changed.",
    )
    INTERRUPTED = 130, "Interrupted by Ctrl-C; of a server, before it was ready."
    TERMINATED = (
        143,
        "Ended by SIGTERM: `router`, after its requests; a server that was not ready yet; commands "
        "that are not servers.",
    )


def status_of(error: Exception) -> ExitStatus:
    """The exit status of a command that raises ``error``."""
    return ExitStatus.WRONG_SETTINGS if isinstance(error, ConfigError) else ExitStatus.FAILED


def show_error(line: str, status: int) -> None:
    """Prints the one line of an error to stderr; under ``--json`` as an object to stdout, where a
    program looks for the result."""
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        print(json.dumps({"error": line.partition(": ")[2], "status": int(status)}), flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Ends a command that raises a KvrecallError, or an OSError about a path, by ``show_error``
    with the status of the error."""
    try:
        yield
    except (KvrecallError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise  # a bug, or a failed connection
        message = str(error)
        if isinstance(error, OSError):
            cure = _CURES.get(error.errno or 0)
            message = f"{error.filename}: {error.strerror}" + (f"; {cure}" if cure else "")
        show_error(f"kvrecall: {message}", status_of(error))
        raise SystemExit(status_of(error)) from error


_CURES = {
    errno.EACCES: "give this user access to it, or use another path",
    errno.EPERM: "give this user access to it, or use another path",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file; check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOSPC: "free some space, or use a path on another file system",
    errno.EDQUOT: "free some space, or use a path on another file system",
    errno.EROFS: "use a path on a writable file system",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "use a shorter path",
}
