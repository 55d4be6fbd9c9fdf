"""Who may use the routes of a listener: by API keys, or by client certificates as MindIE's
configuration describes them (TLS 1.3, revocation); and where it may listen without asking. Needs no
library of the server's, so that the command line can use it."""

from __future__ import annotations

import re
import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvrecall.config import is_loopback
from kvrecall.errors import ConfigError, hide
from kvrecall.secret import read_private

OWN_HEADER = "x-kvrecall"
"""A request header that no page in a browser can send to another origin without being allowed to;
any value."""
DASHBOARD = "/dashboard"
HEALTH = ("/health", "/v2/health/live", "/v2/health/ready", "/ping")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the routes of a listener.

    ``keys``: API keys, each of which opens all routes; none: no key is needed. ``hosts``: names of
    this server in URLs, besides ``localhost`` and addresses. ``origins``: pages' origins
    (``https://chat.example``) whose scripts may use it. ``open_paths``: for these GET needs
    neither key nor a known host. ``public``: matches the paths that clients of other hosts may
    use while there is no key; None: all.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    open_paths: tuple[str, ...] = HEALTH
    public: re.Pattern[str] | None = None


def read_keys(path: Path, name: str) -> tuple[str, ...]:
    """The API keys in a file, one a line; what begins with ``#`` is a comment and opens nothing.
    Raises ConfigError."""
    try:
        lines = read_private(path, name, "write the key to it").decode().split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {path} holds bytes that are not text") from None
    keys = tuple(key for line in lines if (key := line.strip()) and key[0] != "#")
    if not keys:
        raise ConfigError(f"{name}: {path} is empty; write the key to it")
    for key in keys:
        hide(key)
    return keys


def known_hosts(names: Iterable[str], bound: str) -> frozenset[str]:
    """``Access.hosts`` of a listener that is bound to ``bound``, an address or a name."""
    return frozenset(name.lower() for name in (*names, bound))


def check_reach(setting: str, host: str, protected: bool, allowed: bool) -> None:
    """Raises ConfigError for a listener on ``host``, which ``setting`` names, that other hosts
    reach without being asked for a key or a certificate, unless that is ``allowed``."""
    if protected or allowed or is_loopback(host):
        return
    raise ConfigError(
        f"{setting} is {host}, which other hosts reach, and no API key is set, so anyone there "
        "could use this server; give a key with --api-key-file FILE, or a loopback address, or "
        "allow it with --allow-unauthenticated"
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of an HTTPS listener. ``authorities`` sign the clients' certificates;
    ``password``: the file with that of an encrypted key."""

    certificate: Path
    key: Path
    authorities: tuple[Path, ...]
    revoked: tuple[Path, ...] = ()
    password: Path | None = None

    def check(self) -> list[str]:
        """Warnings about the files. Raises ConfigError if one is missing or unusable."""
        for path in (self.certificate, self.key, *self.authorities, *self.revoked):
            if not path.is_file():
                raise ConfigError(f"there is no file {path}")
        self.context()
        if self.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return [f"the private key {self.key} is accessible to other users; chmod 600 it"]
        return []

    def context(self) -> ssl.SSLContext:
        """A server context that admits only clients with a certificate of ``authorities``. Raises
        ConfigError naming the file that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._password)
        except (ssl.SSLError, OSError) as error:
            word = f", or {self.password} lacks its password in text" if self.password else ""
            files = f"{self.certificate} and {self.key} are not a PEM certificate and its key"
            raise ConfigError(f"{files}{word}: {error}") from error
        for path in (*self.authorities, *self.revoked):
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"{path} is not a PEM file: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        if self.revoked:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return context

    def _password(self) -> bytes:
        if self.password is None:
            cure = "decrypt it (openssl pkey -in KEY -out PLAIN), or name its password's file"
            raise ConfigError(f"the private key is encrypted; {cure} (tlsPkPwd)")
        word = read_private(self.password, "tlsPkPwd", "write the password to it").rstrip(b"\r\n")
        hide(word.decode(errors="replace"))
        return word
