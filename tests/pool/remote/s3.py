"""A real S3-compatible server (moto) in a process of its own, on a loopback port."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import httpx

from kvrecall.processes.command import as_child
from kvrecall.processes.ports import free_port

BUCKET = "blocks"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    endpoint: str
    log: IO[bytes]

    def requests(self, verb: str) -> int:
        """How many requests of that kind it was sent so far."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).count(f'"{verb} /'.encode())

    def options(self, prefix: str, **more: object) -> dict[str, object]:
        """Options of a store in this server, below ``prefix``."""
        keys = {"access_key_id": "test", "secret_access_key": "top-secret"}
        return {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "options": keys,
            "timeout": 60,  # of a busy machine
            **more,
        }


@contextmanager
def s3_server() -> Iterator[Server]:
    port = free_port()
    command = as_child(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            _await_bucket(server)
            yield server
        finally:
            process.kill()
            process.wait()


def _await_bucket(server: Server) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            httpx.put(f"{server.endpoint}/{BUCKET}", timeout=10).raise_for_status()
            return
        except httpx.TransportError:
            assert server.process.poll() is None, "the S3 server ended"
            assert time.monotonic() < until, "the S3 server does not answer"
            time.sleep(0.1)
