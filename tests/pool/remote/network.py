"""Several hosts on one machine: network namespaces joined by a bridge in one of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

MASTER, FIRST, SECOND = 1, 2, 3
"""Hosts by what they are for."""

_numbers = itertools.count()


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=30)


def why_not() -> str:
    """Why namespaces cannot be created here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no ip command"
    name = f"kvr{os.getpid()}t"
    try:
        made = ip("netns", "add", name, check=False)
        if made.returncode:
            return f"ip netns is not permitted: {made.stderr.strip()}"
        tried = ip("netns", "exec", name, "true", check=False)
        return "" if tried.returncode == 0 else f"ip netns exec fails: {tried.stderr.strip()}"
    finally:
        ip("netns", "del", name, check=False)


class Network:
    """Hosts 10.213.0.1, .2, ... that reach each other and nothing else. Use as a context manager:
    whatever happens, its namespaces are gone afterwards."""

    def __init__(self, hosts: int) -> None:
        self._tag = f"kvr{os.getpid()}n{next(_numbers)}"
        self._hosts = hosts
        self._hub = f"{self._tag}hub"

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
        ip("-n", self._hub, "link", "set", "br0", "up")
        for host in range(1, self._hosts + 1):
            space, port = self.space(host), f"port{host}"
            ip("netns", "add", space)
            ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "eth0", "netns", space)
            ip("-n", self._hub, "link", "set", port, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in [*map(self.space, range(1, self._hosts + 1)), self._hub]:
            ip("netns", "del", name, check=False)

    def space(self, host: int) -> str:
        return f"{self._tag}h{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.0.{host}"

    def prefix(self, host: int) -> list[str]:
        """Runs the command that follows on that host."""
        return ["ip", "netns", "exec", self.space(host)]

    def cut(self, host: int) -> None:
        """From now on drops all packets to and from the host."""
        ip("-n", self._hub, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        ip("-n", self._hub, "link", "set", f"port{host}", "master", "br0")


class PoolHost:
    """A process with a pool on a host of the network; it does one order after the other."""

    def __init__(self, network: Network, host: int, settings: dict[str, Any], log: Path) -> None:
        self._log = log
        program = [sys.executable, "-m", "tests.pool.remote.pool_host", json.dumps(settings)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*network.prefix(host), *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=Path(__file__).parents[3],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def do(self, what: str, limit_s: float = 60.0, **more: Any) -> dict[str, Any]:
        """The reply to an order; AssertionError if none comes within ``limit_s``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        guard = threading.Timer(limit_s, self._process.kill)
        guard.start()
        try:
            self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        assert line, f"the pool did not answer {what!r}: {self._log.read_text()[-3000:]}"
        return dict(json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it in order if it lives. Idempotent."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
