"""Ports for servers that tests, demo and benchmarks start."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST = 20_000  # Mooncake uses 12,300 to 17,000
_LEAST = 2_000  # ports to choose from
_claims: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that is free on every address of this host.

    It stays free until the server starts: the system gives outgoing connections higher ports, and
    no other process gets the port from this function while this process runs. Linux. Raises
    OSError if there is none.
    """
    end = _first_ephemeral()
    low = _LOWEST if end - _LOWEST >= _LEAST else 1024
    start = secrets.randbelow(end - low)
    for step in range(end - low):
        port = low + (start + step) % (end - low)
        if _is_free(port) and _claim(port):
            return port
    raise OSError(f"no port from {low} to {end - 1} is free")


def two_ports() -> int:
    """The first of two ports next to each other, both as ``free_port``'s."""
    while True:
        port = free_port()
        if _is_free(port + 1) and _claim(port + 1):
            return port


def _first_ephemeral() -> int:
    """The lowest port of outgoing connections."""
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        low = 32768
    return low if low - 1024 >= _LEAST else 32768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """Reserves the port among callers of ``free_port``, by a name that ends with this process."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvrecall-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
