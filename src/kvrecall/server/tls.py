"""Mutual TLS as MindIE's configuration describes it: TLS 1.3, client certificates, revocation."""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of an HTTPS listener. ``authorities`` sign the clients' certificates."""

    certificate: Path
    key: Path
    authorities: tuple[Path, ...]
    revoked: tuple[Path, ...] = ()

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
        """A server context that admits only clients with a certificate of ``authorities``.

        Raises ConfigError naming the file that cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key, password=_refuse_password)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.certificate} and {self.key} are not a PEM certificate and its key: {error}"
            ) from error
        for path in (*self.authorities, *self.revoked):
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"{path} is not a PEM file: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        if self.revoked:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return context


def _refuse_password() -> str:
    raise ConfigError("the private key is encrypted; decrypt it (openssl pkey -in KEY -out PLAIN)")
