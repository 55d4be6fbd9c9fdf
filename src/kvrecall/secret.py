"""Secrets: no setting holds one. A setting names the file that does, ``{"file": "/path"}``; and
whether a file or folder is this user's alone (``exposure``).

vLLM prints its options, a connector's settings among them, hands them to all its processes and
repeats them when it dies. So a secret in a setting is refused at the edge (``refuse_open``), and
``opened`` puts the files' contents in where the settings are handed to the library that needs them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvrecall.errors import ConfigError, hidden, hide

WRITE = 0o022
ACCESS = 0o077
"""What others may not do: write, or anything."""

_MAX_BYTES = 64 << 10
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WORDS = frozenset(
    "auth authorization bearer cookie credential credentials dsn jwt key keys pass passphrase "
    "passwords pw pwd sas secrets signature sig".split()
)
_ENDINGS = tuple("apikey accesskey secretkey privatekey password passwd secret token".split())
"""What the words of a secret's name are, or end with, as PGPASSWORD does."""
_HARMLESS = frozenset(
    "algorithm count dir enabled endpoint file id length len md5 name path prefix size timeout ttl "
    "type uri url".split()
)
"""A name that ends with one of these says something about a secret, and is none."""
_EXCEPTIONS = {"access_key_id": True, "application_credentials": False}  # the latter is a path
_USER = (  # in a URL, a wrong one too; or without "//", but not behind a "/", as in a path
    r"(?:^|:)//(?:[^/?#\s]*@|[^/?#\s:@]*:(?!\d+/)[^\s@]*@)"
    r"|(?:^|[^/:\w.%+~-])[\w.%+~-]*:(?!//|\d+/)[^\s@]{,999}@"
    r"|:(?!//|\d+/)[^\s@]{,999}@[\w.-]+:\d+(?![\w-])"
)
_OPEN = re.compile(rf"{_USER}|^(?i:bearer|basic)\s+\S")
_ASSIGNED = re.compile(r"(?:^|[?&;,#\s])([\w.-]+)\s*=\s*[^\s&;]")  # in a query, or for a driver
_MEMBER = re.compile(r"""["']([\w.-]+)["']\s*:""")  # of JSON, or of a mapping's repr


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret, in snake, kebab or camel case."""
    words = [word.lower() for word in _WORD.findall(name)]
    for ending, answer in _EXCEPTIONS.items():
        if "_".join(words).endswith(ending):
            return answer
    named = any(word in _WORDS or word.endswith(_ENDINGS) for word in words)
    return named and words[-1] not in _HARMLESS


TO_A_FILE = 'write it to a file of this user (mode 0600) and here {"file": "/path"}'
MOONCAKE = "Mooncake takes Redis's password from MC_REDIS_PASSWORD; leave it out here"
"""The cures of a secret in settings."""


def refuse_open(value: object, name: str, cure: str = TO_A_FILE) -> None:
    """Raises ConfigError, which shows no value, if the setting ``name`` holds a secret itself: by
    the name of an option in it, or as a user or token in a URL."""
    if _file_of(value) is not None:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            inside = f"{name}.{key}"
            if is_secret(str(key)) and not (
                isinstance(inner, bool | Mapping) or inner in (None, "", "true", "false")
            ):
                raise ConfigError(
                    f"{inside} is a secret, and settings are printed; {cure}. If this one was in "
                    "use, replace it"
                )
            refuse_open(inner, inside, cure)
    elif isinstance(value, list | tuple):
        for inner in value:
            refuse_open(inner, name, cure)
    elif isinstance(value, str) and _holds_secret(value):
        raise ConfigError(
            f"{name} is a URL or a text with a user, a password or a token in it, and settings are "
            f"printed; {cure}"
        )


def opened(options: Mapping[str, object], name: str) -> dict[str, Any]:
    """``options`` with the content of the file for each ``{"file": "/path"}``, which no error
    shows from now on. Raises ConfigError if a file cannot be read, or others can read it."""
    return {key: _opened(value, f"{name}.{key}") for key, value in options.items()}


def _opened(value: object, name: str) -> object:
    if (path := _file_of(value)) is None:
        return opened(value, name) if isinstance(value, Mapping) else value
    file = Path(path).expanduser()
    try:
        secret = read_private(file, name, "write the secret to it").decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {file} holds bytes that are not text") from None
    if not secret:
        raise ConfigError(f"{name}: {file} is empty; write the secret to it")
    hide(secret)
    return secret


def words_shown(words: Iterable[str]) -> list[str]:
    """The words of a command line, for a log: without the values of secret options, nor any that
    hold a secret."""
    shown: list[str] = []
    follows = False  # a secret, or several: --api-key takes any number
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if is_option:
            follows = not equals and is_secret(name)
        if equals and (is_secret(name) or _shows_secret(value)):
            shown.append(f"{name}=***")
        else:
            hides = (follows and not is_option) or _shows_secret(word)
            shown.append("***" if hides else hidden(word))
    return shown


def _shows_secret(word: str) -> bool:
    return _holds_secret(word) or any(map(is_secret, _MEMBER.findall(word)))


def _holds_secret(text: str) -> bool:
    """Whether a text is a URL or header with a secret in it, or assigns one."""
    return bool(_OPEN.search(text)) or any(map(is_secret, _ASSIGNED.findall(text)))


def read_private(path: Path, name: str, cure: str) -> bytes:
    """The content of a file that only its owner, this user or root, can read. Raises ConfigError,
    which never shows it. ``name``: of the setting; ``cure``: if there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(f"{name}: there is no file {path}; {cure}") from None
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{name}: {path} is not a file")
        if why := exposure(path, status, ACCESS, root_too=True):
            raise ConfigError(f"{name}: {why}")
        with os.fdopen(fd, "rb", closefd=False) as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"{name}: {path} cannot be read: {why}") from error
    finally:
        os.close(fd)
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{name}: {path} is larger than {_MAX_BYTES >> 10} KiB")
    return raw


def _file_of(value: object) -> str | None:
    """The path in ``{"file": "/path"}``; None for another value."""
    if isinstance(value, Mapping) and value.keys() == {"file"}:
        path = value["file"]
        return path if isinstance(path, str) and path else None
    return None


def exposure(path: Path, status: os.stat_result, forbidden: int, root_too: bool = False) -> str:
    """Why others can change the file or folder at ``path``, or do what is ``forbidden``, with the
    cure; "" if they cannot. ``root_too``: it may be root's."""
    is_folder = stat.S_ISDIR(status.st_mode)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() and not (root_too and status.st_uid == 0):
        return (
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; give it to this user "
            f"(chown), or use another {'folder' if is_folder else 'file'}"
        )
    if not mode & forbidden:
        return ""
    do, cure = "may read", f"run: chmod {700 if is_folder else 600} {path}"
    if forbidden == WRITE:
        do = "can write to"
        if is_folder:
            cure += ", or name a folder below it, which kvrecall makes"
    return f"{path} has mode {mode:04o}, so others {do} it; {cure}"
