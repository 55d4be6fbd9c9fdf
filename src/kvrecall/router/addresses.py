"""Addresses of instances as the command line has them: ``http://HOST:PORT?events=5557&pool=5601``."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx

from kvrecall.errors import ConfigError
from kvrecall.events.subscriber import Publisher
from kvrecall.router.fleet import Address

_OPTIONS = {"engine": "--engine", "prefill": "--prefill", "decode": "--decode"}
_MOST_BYTES = 1 << 20  # of a file of instances


class Roster:
    """The instances, as options give them for the router's life, and as a file lists them now:
    ``engine URL``, ``prefill URL`` or ``decode URL``, one a line, and comments behind ``#``."""

    def __init__(self, given: Mapping[str, Sequence[str] | None], file: Path | None) -> None:
        """``given``: addresses by option."""
        self._given = {option: list(texts or ()) for option, texts in given.items()}
        self._file = file
        self._seen: list[str] | str = ""
        self._read: list[str] | str = ""
        self._lists_any = False

    def has_changed(self) -> bool:
        """Whether the file says another thing than was read last, and the same as at the last call:
        while it is being written, it may be cut anywhere."""
        if self._file is None:
            return False
        before, self._seen = self._seen, _lines(self._file)
        return before == self._seen != self._read

    def read(self) -> list[tuple[Address, ...]]:
        """Engines, prefill and decode instances. Raises ConfigError, also if the file has become
        empty: one that is meant to list none has a comment."""
        if self._file is None:
            return addresses(self._given)
        lines = self._read = self._seen or _lines(self._file)
        if isinstance(lines, str):
            raise ConfigError(lines)
        if self._lists_any and not any(line.strip() for line in lines):
            raise ConfigError(
                f"--instances: {self._file} is empty; if no instance is left, write '# none' there"
            )
        listed = {option: list(texts) for option, texts in self._given.items()}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or words[0] not in _OPTIONS:
                raise ConfigError(
                    f"--instances: {self._file}, line {number}: {_shown(line)} is not a role and a "
                    "URL; write for example 'engine http://10.0.0.5:8000'"
                )
            address(words[1], f"--instances: {self._file}, line {number}")
            listed[_OPTIONS[words[0]]].append(words[1])
        found = addresses(listed, may_be_none=True)
        self._lists_any = listed != self._given
        return found


def _lines(file: Path) -> list[str] | str:
    """Or why there are none. Does not wait, as reading a pipe would."""
    try:
        state = file.stat()
        if stat.S_ISDIR(state.st_mode):
            why = "Is a directory"
        elif not stat.S_ISREG(state.st_mode):
            why = "it is not a file"
        elif state.st_size > _MOST_BYTES:
            why = "it is larger than 1 MiB"
        else:
            return file.read_text("utf-8-sig").splitlines()
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "it is not text"
    cure = "give a file with a line such as 'engine http://10.0.0.5:8000' for each instance"
    return f"--instances: {file}: {why}; {cure}"


def addresses(
    given: Mapping[str, Sequence[str] | None], may_be_none: bool = False
) -> list[tuple[Address, ...]]:
    """The instances given with each option, in its order. ``may_be_none``: no instance is no error.
    Raises ConfigError."""
    options: dict[str, str] = {}
    made: list[tuple[Address, ...]] = []
    for option, texts in given.items():
        made.append(tuple(address(text, option) for text in texts or ()))
        for one in made[-1]:
            if one.url in options:
                again = options[one.url]
                twice = f"{option}: {one.url} is given twice"
                apart = f"{one.url} is given for {again} and for {option}"
                raise ConfigError(twice if again == option else apart)
            options[one.url] = option
    engines, prefill, decode = made
    if engines and (prefill or decode):
        raise ConfigError(
            "--engine: engines without roles do not go with --prefill and --decode; give all "
            "instances with --engine, or each with its role"
        )
    if not engines and not decode and not (may_be_none and not prefill):
        raise ConfigError("--engine: no instance is given; give engines, or --prefill and --decode")
    return made


def address(text: str, option: str) -> Address:
    """``text``, a URL or ``host:port``, with the ports of its events, if any. Raises
    ConfigError."""
    is_url = "://" in text
    url = text if is_url else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0 and (is_url or parts.port is not None)
        named = named and bool(httpx.URL(url).host) and bool((parts.hostname or "").encode("idna"))
    except (ValueError, httpx.InvalidURL):  # of hosts that are no names: also UnicodeError
        named = False
    if named and "@" in parts.netloc:
        raise ConfigError(
            f"{option}: the address of {parts.hostname} has a user or a password, which clients "
            "would see in the header x-kvrecall; leave it out, and use --api-key"
        )
    if not named or parts.scheme not in ("http", "https") or parts.path.strip("/"):
        raise ConfigError(
            f"{option}: {_shown(text)} is not an address of an instance; write for example "
            "http://10.0.0.5:8000"
        )
    events: list[Publisher] = []
    pool: Publisher | None = None
    host = parts.hostname or ""
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "events":
            events.append(_publisher(host, value, f"{option}: {url!r}: events"))
        elif name == "pool" and pool is None:
            pool = _publisher(host, value, f"{option}: {text!r}: pool")
        else:
            raise ConfigError(
                f"{option}: {url!r}: {name!r} is unknown or given twice; known are events=PORT "
                "(of the engine's KV events) and pool=PORT (of its pool service's)"
            )
    place = httpx.URL(url).netloc.decode()  # in ASCII, without the port that is usual
    return Address(f"{parts.scheme}://{place}", tuple(events), pool)


def _shown(text: str) -> str:
    """Its begin, for messages; without a password."""
    return repr(re.sub(r"//\S*@", "//", text.strip())[:80])


def _publisher(host: str, value: str, where: str) -> Publisher:
    """``PORT`` (replay is one higher) or ``PORT/REPLAY_PORT``."""
    first, _, second = value.partition("/")
    if first.isdecimal() and (second.isdecimal() or not second):
        port = int(first)
        replay = int(second) if second else port + 1
        if 0 < port < 65536 and 0 < replay < 65536:
            return Publisher(host, port, replay)
    raise ConfigError(
        f"{where}: {value!r} is not a port; write the port of kv_events_config's endpoint, with "
        "that of its replay_endpoint behind a slash unless it is one higher: events=5557/5600"
    )
