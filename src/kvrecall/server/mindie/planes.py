"""The three planes of a config.json: where each listens, and with which certificates."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.engines.base import Listener
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document
from kvrecall.server.mindie.reading import problem
from kvrecall.server.mindie.schema import ServerSection
from kvrecall.server.plan import Plane
from kvrecall.server.tls import TlsFiles

_SERVER = ("ServerConfig",)
_PREFIXES = {Plane.BUSINESS: "tls", Plane.MANAGEMENT: "managementTls", Plane.METRICS: "metricsTls"}
_LENDERS = {Plane.MANAGEMENT: Plane.BUSINESS, Plane.METRICS: Plane.MANAGEMENT}
"""Whose certificates a plane uses that has none of its own."""


@dataclass(frozen=True, slots=True)
class Planes:
    """The business plane's address and TLS, the further listeners, and who is served where."""

    host: str
    tls: TlsFiles | None
    listeners: tuple[Listener, ...]
    homes: Mapping[Plane, str]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class PlanePlanner:
    """Works through ServerConfig. Planes with the same address and port share a listener."""

    def __init__(self, server: ServerSection, document: Document, folder: Path) -> None:
        self._server = server
        self._document = document
        self._folder = folder
        self._warnings: list[str] = []

    def planned(self) -> Planes:
        """The planes. Raises ConfigError with the field it is about."""
        server = self._server
        host = self._address("ipAddress")
        own = server.managementIpAddress is not None
        other = self._address("managementIpAddress") if own else host
        wanted = {
            Plane.MANAGEMENT: (other, server.managementPort),
            Plane.METRICS: (other, server.metricsPort),
        }
        sharing: dict[tuple[str, int], list[Plane]] = {}
        for plane, address in wanted.items():
            if address == (host, server.port):
                continue
            sharing.setdefault(address, []).append(plane)
        self._warn_in_the_clear({host, *(address for address, _ in sharing)})
        tls = self._tls(Plane.BUSINESS)
        listeners = tuple(
            Listener("+".join(planes), *address, self._tls(planes[0]))
            for address, planes in sharing.items()
        )
        self._check_apart((host, server.port), listeners)
        homes = {plane: "+".join(planes) for planes in sharing.values() for plane in planes}
        notes = [
            f"the {plane} plane shares the business plane's" for plane in wanted.keys() - homes
        ]
        return Planes(host, tls, listeners, homes, tuple(sorted(notes)), tuple(self._warnings))

    def _address(self, name: str) -> str:
        text: str = getattr(self._server, name)
        path = (*_SERVER, name)
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            said = f"is {text!r}; it must be an IPv4 or IPv6 address"
            raise problem(self._document, path, said) from None
        if address.is_unspecified and not self._server.allowAllZeroIpListening:
            raise problem(
                self._document,
                path,
                f"is {text}, which listens on every network; allowed only with "
                "ServerConfig.allowAllZeroIpListening true",
            )
        return text

    def _check_apart(self, business: tuple[str, int], listeners: tuple[Listener, ...]) -> None:
        """Planes on one port need one address: 0.0.0.0 takes the port of all others too."""
        taken = [business]
        for listener in listeners:
            for host, port in taken:
                whole = any(ipaddress.ip_address(h).is_unspecified for h in (host, listener.host))
                if port == listener.port and whole:
                    name = "managementPort" if listener.name.startswith("man") else "metricsPort"
                    raise problem(
                        self._document,
                        (*_SERVER, name),
                        f"is {port} on {listener.host}, which {host}:{port} already takes; "
                        "choose another port, or the same address for both",
                    )
            taken.append((listener.host, listener.port))

    def _warn_in_the_clear(self, hosts: set[str]) -> None:
        if self._server.httpsEnabled:
            return
        if not all(ipaddress.ip_address(host).is_loopback for host in hosts):
            self._warnings.append("httpsEnabled is false: requests travel in the clear")

    def _tls(self, plane: Plane) -> TlsFiles | None:
        """The certificates of a plane; None if nothing is encrypted."""
        if not self._server.httpsEnabled:
            return None
        prefix = self._prefix(plane)
        for name in ("Cert", "Pk", "CaFile"):
            if not self._field(prefix, name):
                said = "is required when httpsEnabled is true"
                if prefix != "tls":
                    said = f"is required beside {prefix}Cert"
                raise problem(self._document, (*_SERVER, f"{prefix}{name}"), said)
        files = self._files(prefix)
        try:
            self._warnings += [w for w in files.check() if w not in self._warnings]
        except ConfigError as error:
            at = "httpsEnabled" if prefix == "tls" else f"{prefix}Cert"
            said = "is true" if prefix == "tls" else f"is {self._field(prefix, 'Cert')!r}"
            raise problem(self._document, (*_SERVER, at), f"{said}; {error}") from error
        return files

    def _prefix(self, plane: Plane) -> str:
        """The prefix of the fields that hold the certificates for ``plane``."""
        prefix = _PREFIXES[plane]
        own = any(self._field(prefix, name) for name in ("Cert", "Pk"))
        return prefix if own or plane not in _LENDERS else self._prefix(_LENDERS[plane])

    def _field(self, prefix: str, name: str) -> object:
        return getattr(self._server, f"{prefix}{name}", None)

    def _files(self, prefix: str) -> TlsFiles:
        server = self._server
        crl = self._field(prefix, "Crl")
        revoked = [*_names(self._field(prefix, "CrlFiles")), *([str(crl)] if crl else [])]
        folder = str(self._field(prefix, "CrlPath") or "")
        return TlsFiles(
            certificate=self._resolved(str(self._field(prefix, "Cert"))),
            key=self._resolved(str(self._field(prefix, "Pk"))),
            authorities=tuple(
                self._resolved(server.tlsCaPath, name)
                for name in _names(self._field(prefix, "CaFile"))
            ),
            revoked=tuple(self._resolved(folder, name) for name in revoked),
        )

    def _resolved(self, *parts: str) -> Path:
        """A path of the file; relative ones lie beside the file."""
        return self._folder.joinpath(*parts).absolute()


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []
