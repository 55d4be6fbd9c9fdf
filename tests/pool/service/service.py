"""A real service process, to be killed and started again."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from kvrecall.block import Namespace
from kvrecall.pool.service.admin import Overview, ServiceAdmin, Stat
from kvrecall.pool.service.client import ServiceClient
from kvrecall.processes.command import as_child

MIB = 1 << 20
TEMPLATE = """
import gc, json, os, resource, sys
from pathlib import Path
from kvrecall.config import DiskConfig, PoolConfig, PoolTerms
from kvrecall.pool.service.endpoint import serve

def run(folder, host_bytes, max_files, events, read_only):
    if max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    folder = Path(folder)

    def publish(pool):
        from kvrecall.events.publisher import EventPublisher

        return EventPublisher(pool, "127.0.0.1", events).close

    serve(
        PoolConfig(
            host_bytes,
            DiskConfig(folder / "disk", 256 << 20),
            terms=PoolTerms(read_only_namespaces=tuple(read_only)),
        ),
        folder / "pool.sock",
        lambda: print("ready", flush=True),
        publish if events else None,
    )

gc.freeze()
children = set()
for line in sys.stdin:
    order, *words = json.loads(line)
    if order == "start":
        child = os.fork()
        if not child:
            status = 1
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                run(*words)
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())
                    print("failed", flush=True)
                os._exit(status)
        children.add(child)
        print(child, flush=True)
    else:
        children.discard(words[0])
        print(os.waitstatus_to_exitcode(os.waitpid(words[0], 0)[1]), flush=True)
for child in children:
    os.kill(child, 9)
"""


class Template:
    """A process that has imported the service, and forks: a start takes it no second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            as_child(sys.executable, "-c", TEMPLATE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: object) -> int:
        """The process of a service that listens."""
        pid = int(self._ask("start", *words))
        assert self._line() == "ready"
        return pid

    def wait(self, pid: int) -> int:
        return int(self._ask("wait", pid))

    def _ask(self, *words: object) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


template = functools.cache(Template)


class Service:
    """``kvrecall pool serve`` in a folder of its own, with a disk."""

    def __init__(
        self, folder: Path, host_bytes: int = 32 * MIB, max_files: int = 0, events: int = 0
    ) -> None:
        """``events``: the port at which it publishes KV events, if any."""
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self.socket = folder / "pool.sock"
        self._host_bytes = host_bytes
        self._max_files = max_files
        self._events = events
        self.read_only: list[str] = []  # namespaces, from the next start on
        self._runs = False
        self._clients = ExitStack()
        self.start()

    def start(self) -> None:
        self.pid = template().start(
            str(self.folder), self._host_bytes, self._max_files, self._events, self.read_only
        )
        self._runs = True

    def kill(self) -> None:
        """kill -9"""
        if self._runs:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        self._runs = False
        return template().wait(self.pid)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def client(self, name: Namespace | None = None, nbytes: int = 0) -> ServiceClient:
        """One that has registered ``name``, if given. Ends with the service, if not before."""
        client = self._clients.enter_context(closing(ServiceClient(self.socket, 60.0)))
        if name is not None:
            client.register(name, nbytes)
        return client

    def look(self) -> Overview:
        with ServiceAdmin(self.socket, 60.0) as admin:
            return admin.do(Stat())

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()
        self.kill()
