"""A real Redis in a process of its own, on a loopback port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvrecall.processes.ports import free_port

PASSWORD = "not so secret"


def redis_program() -> str | None:
    """The server's program. Debian's redis-tools hold it under another name: what it does is
    decided by the name it is called by."""
    names = ("redis-server", "valkey-server", "redis-check-rdb", "valkey-check-rdb")
    return next((found for name in names if (found := shutil.which(name))), None)


@contextmanager
def redis_server(program: str) -> Iterator[int]:
    """Its port."""
    port = free_port()
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "requirepass": PASSWORD}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen(
        ["redis-server", *words], executable=program, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "Redis ended"
                assert time.monotonic() < until, "Redis does not answer"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
