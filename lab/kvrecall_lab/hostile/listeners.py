"""What attacks share: waiting, work beside them, and listeners that play a part: HTTP servers, raw
sockets, and ZeroMQ's handshake."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvrecall_lab.hostile.attack import Stalled

Play = Callable[[socket.socket], None]


def until(is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Raises Stalled if it is not so in time."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise Stalled(otherwise)
        time.sleep(0.05)


def while_running(load: Callable[[], object]) -> Iterator[None]:
    """Runs ``load`` in a thread; goes on, every hundredth of a second, until it has ended."""
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    while thread.is_alive():
        yield
        thread.join(0.01)


def said_by(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command; what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@contextlib.contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server whose requests ``answer`` answers, whatever their method; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)
            self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def listening(play: Play) -> Iterator[int]:
    """A server that leaves each connection to ``play``, in a thread; its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def played(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            play(client)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=played, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def shake_hands(link: socket.socket, kind: bytes) -> None:
    """As libzmq does, without security. Raises OSError if the other side does not."""
    link.sendall(b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    link.sendall(bytes((4, len(ready))) + ready)
    link.recv(64, socket.MSG_WAITALL)
    head = link.recv(2, socket.MSG_WAITALL)
    if len(head) < 2:
        raise ConnectionError("the handshake ended")
    link.recv(head[1], socket.MSG_WAITALL)


def frame(body: bytes, more: bool = False) -> bytes:
    """A message's part, or its last one."""
    return bytes((2 | more,)) + len(body).to_bytes(8, "big") + body
