"""The process of Mooncake's client: does what the pool's process asks, call by call.

``python -m kvrecall.pool.remote.mooncake.porter ORDERS``. It is a process of its own because some
of Mooncake's calls (setting up, closing) hold Python's lock for as long as the network is silent,
and because a call that never returns can be ended by ending the process: then nobody writes into
the arena any more. It ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrecall.pool.remote.mooncake.courtesy import Courtesy
from kvrecall.pool.remote.mooncake.wire import (
    HOT_BYTES,
    Orders,
    Piece,
    Reply,
    Request,
    receive_request,
    send,
)

_LOOK_S = 1.0


def main(text: str) -> None:
    """Sets the client up, says so on the first wire, then serves all wires."""
    orders = msgspec.json.decode(text, type=Orders)
    wires = [socket.socket(fileno=fd) for fd in orders.wires]
    threading.Thread(target=_end_with, args=(orders.parent,), daemon=True).start()
    try:
        client, arena = _client(orders)
    except (ImportError, OSError, RuntimeError) as error:
        send(wires[0], Reply([], error=str(error)))
        return
    putting, getting = (threading.Semaphore(orders.at_a_time) for _ in range(2))
    courtesy = Courtesy()
    workers = [_Worker(client, arena, wire, putting, getting, courtesy) for wire in wires]
    for worker in workers[1:]:
        threading.Thread(target=worker.run, daemon=True).start()
    send(wires[0], Reply([0]))
    workers[0].run()
    os._exit(0)


def _client(orders: Orders) -> tuple[Any, ctypes.c_char]:
    """The client, and the first byte of the arena, which stays mapped as long as that lives."""
    from mooncake.store import MooncakeDistributedStore

    fd, offset, nbytes = orders.arena
    page = offset % mmap.ALLOCATIONGRANULARITY
    arena = mmap.mmap(fd, nbytes + page, offset=offset - page)
    first = ctypes.c_char.from_buffer(arena, page)
    client = MooncakeDistributedStore()
    code = client.setup(orders.setup)
    if code != 0:
        raise RuntimeError(f"Mooncake's client cannot be set up (code {code})")
    code = client.register_buffer(ctypes.addressof(first), nbytes)
    if code != 0:
        raise RuntimeError(f"Mooncake cannot register {nbytes} bytes of memory (code {code})")
    return client, first


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


class _Worker:
    """Serves the requests of one wire, one after the other."""

    def __init__(
        self,
        client: Any,
        arena: ctypes.c_char,
        wire: socket.socket,
        putting: threading.Semaphore,
        getting: threading.Semaphore,
        courtesy: Courtesy,
    ) -> None:
        self._client = client
        self._putting = putting
        self._getting = getting
        self._courtesy = courtesy
        self._first = arena  # keeps it mapped
        self._arena = ctypes.addressof(arena)
        self._wire = wire
        self._hot = mmap.mmap(-1, HOT_BYTES)
        self._hot_address = ctypes.addressof(ctypes.c_char.from_buffer(self._hot))
        client.register_buffer(self._hot_address, HOT_BYTES)
        self._answers: dict[str, Callable[[Request], Reply]] = {
            "exists": lambda request: Reply(self._client.batch_is_exist(request.names)),
            "put": self._put,
            "get": self._get,
            "remove": lambda request: Reply(self._client.batch_remove(request.names, True)),
            "close": lambda request: Reply([self._client.close()]),
        }

    def run(self) -> None:
        while (request := receive_request(self._wire)) is not None:
            try:
                reply = self._answers[request.op](request)
            except Exception as error:  # noqa: BLE001 - C++ may throw anything
                reply = Reply([], error=f"{type(error).__name__}: {error}")
            send(self._wire, reply)

    def _put(self, request: Request) -> Reply:
        pointers, sizes, _ = self._places(request.values)
        with self._putting, self._courtesy.call("put", _total(sizes)) as call:
            codes = self._client.batch_put_from_multi_buffers(request.names, pointers, sizes)
            call.moved = not any(codes)
        return Reply(codes)

    def _get(self, request: Request) -> Reply:
        pointers, sizes, hot = self._places(request.values)
        with self._getting, self._courtesy.call("get", _total(sizes)) as call:
            codes = self._client.batch_get_into_multi_buffers(request.names, pointers, sizes)
            call.moved = min(codes, default=0) > 0
        smalls = [[self._hot[begin:end] for begin, end in places] for places in hot]
        return Reply(codes, smalls)

    def _places(
        self, values: Sequence[Sequence[Piece]]
    ) -> tuple[list[list[int]], list[list[int]], list[list[tuple[int, int]]]]:
        """Addresses and sizes of all pieces; and of the small ones, the places in ``_hot``."""
        pointers: list[list[int]] = []
        sizes: list[list[int]] = []
        hot: list[list[tuple[int, int]]] = []
        at = 0
        for pieces in values:
            mine: list[tuple[int, int]] = []
            hot.append(mine)
            pointers.append([])
            sizes.append([])
            for piece in pieces:
                if isinstance(piece, tuple):
                    address, size = self._arena + piece[0], piece[1]
                else:
                    size = piece if isinstance(piece, int) else len(piece)
                    if isinstance(piece, bytes):
                        self._hot[at : at + size] = piece
                    mine.append((at, at + size))
                    address = self._hot_address + at
                    at += size
                pointers[-1].append(address)
                sizes[-1].append(size)
        return pointers, sizes, hot


def _total(sizes: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, sizes))


if __name__ == "__main__":
    main(sys.argv[1])
