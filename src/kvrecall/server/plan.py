"""The plan of a server: everything decided before the first side effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrecall.engines.base import ServeSpec

BLOCK_SIZE = 128
SHUTDOWN_TIMEOUT_S = 30

ENGINE_DEFAULTS: Mapping[str, object] = {
    "block-size": BLOCK_SIZE,
    "enable-prefix-caching": True,
    "prefix-caching-hash-algo": "sha256_cbor",  # reproducible: blocks outlive the process
    "enable-prompt-tokens-details": True,
    "shutdown-timeout": SHUTDOWN_TIMEOUT_S,
}
"""Engine options kvrecall sets where nobody asks otherwise (names as in ServeSpec.options)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request to serve. ``notes`` and ``warnings`` are logged once at the start."""

    spec: ServeSpec
    max_body_bytes: int = 40 << 20
    max_links: int = 1000
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def summary(self) -> str:
        """The effective configuration in one line."""
        options = {k: v for k, v in self.spec.options.items() if v is not None}
        engine = ", ".join(f"{name}={value}" for name, value in options.items())
        pool = ", ".join(f"{name}={value}" for name, value in (self.spec.recall or {}).items())
        off = "off" if self.spec.recall is None else pool or "defaults"
        extra = " " + " ".join(self.spec.extra_args) if self.spec.extra_args else ""
        return f"model {self.spec.model}; pool: {off}; engine: {engine}{extra}"
