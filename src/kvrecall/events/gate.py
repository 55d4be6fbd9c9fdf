"""Stands between TCP ports and the ZeroMQ sockets of a publisher of KV events.

ZeroMQ keeps what a peer sends without a bound: parts of a message that never ends, one subscription
after another. So it listens in a folder of this user's alone, and the gate passes bytes on: all
that the publisher sends, as fast as a reader takes it, and little in the other direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from functools import partial

_LOG = logging.getLogger(__name__)
MOST_READERS = 32
"""Connections at a time, over all ports of a publisher."""
MOST_SENT = 64 << 10
"""Bytes that a reader may send over one connection; a subscription or a request takes about a
hundred, so that one who sends more is no reader, or comes again."""
_CHUNK = 64 << 10
_GOODBYE_S = 1.0


class EventGate:
    """Listens until ``close``, in a thread of its own. ``inner``: where the sockets behind it
    listen, in ZeroMQ's notation, one for each address."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        """``addresses``: host ("*": all of IPv4) and port. Raises OSError if it cannot listen at
        one."""
        self._readers = 0
        with contextlib.ExitStack() as undo:
            listeners = []
            for host, port in addresses:
                listener = socket.create_server(
                    ("" if host == "*" else host, port),
                    family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                )
                listeners.append(undo.enter_context(listener))
            self._folder = tempfile.mkdtemp(prefix="kvrecall-events-")
            undo.pop_all()
        self._paths = [f"{self._folder}/{number}" for number in range(len(addresses))]
        self.inner = [f"ipc://{path}" for path in self._paths]
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listeners,), name="kvrecall-events-gate", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Passes on what the sockets behind it sent before they closed, for a second."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, listeners: Sequence[socket.socket]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listeners))

    async def _serve(self, listeners: Sequence[socket.socket]) -> None:
        servers = [
            await asyncio.start_server(partial(self._admit, path), sock=listener)
            for path, listener in zip(self._paths, listeners, strict=True)
        ]
        await self._ending.wait()
        for server in servers:
            server.close()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        if passing:
            await asyncio.wait(passing, timeout=_GOODBYE_S)

    async def _admit(self, path: str, reader: StreamReader, writer: StreamWriter) -> None:
        if self._readers >= MOST_READERS:
            _LOG.warning("KV events: %d readers are connected; another is refused", MOST_READERS)
            writer.transport.abort()
            return
        self._readers += 1
        inner: StreamWriter | None = None
        try:
            back, inner = await asyncio.open_unix_connection(path)
            ways = [
                asyncio.ensure_future(_pass(reader, inner, MOST_SENT)),
                asyncio.ensure_future(_pass(back, writer)),
            ]
            _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in left:
                way.cancel()
            writer.close()
            async with asyncio.timeout(_GOODBYE_S):
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # the reader is gone or does not read; or the publisher ends
        finally:
            self._readers -= 1
            for end in (writer, inner):
                if end is not None:
                    end.transport.abort()


async def _pass(source: StreamReader, sink: StreamWriter, most: float = float("inf")) -> None:
    """Passes on at most so many bytes, until one of the ends closes."""
    with contextlib.suppress(OSError):
        while (most := most - len(data := await source.read(_CHUNK))) >= 0 and data:
            sink.write(data)
            await sink.drain()
