"""A tier of one's own: blocks in Redis (Valkey, KeyDB, ...), with the standard library alone.

In pool.json or kv_connector_extra_config, with this file's folder on PYTHONPATH:
    "remote": {"kind": "own_store:RedisStore", "host": "127.0.0.1", "port": 6379, "ttl": 86400}
Redis bounds the memory: maxmemory 8gb, maxmemory-policy allkeys-lru.
"""

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvrecall.pool.remote.backends import is_loopback
from kvrecall.pool.remote.store import Object

DEFAULTS = {"host": "127.0.0.1", "port": 6379, "password": "", "ttl": 0, "timeout": 4.0}


class RedisStore:
    """A ``Store``. Every call is one round trip, over a connection of its own."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - DEFAULTS.keys():
            raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(DEFAULTS)}")
        self._options = {**DEFAULTS, **options}
        self._idle: list[_Connection] = []  # its append and pop are atomic

    @property
    def exposed(self) -> str:
        host = self._options["host"]
        if is_loopback(host) and self._options["password"]:
            return ""
        return f"host is {host!r}: Redis sends blocks in the clear, or asks for no password"

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._ask((b"EXISTS", n.encode()) for n in names)]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        expiry = (b"EX", b"%d" % self._options["ttl"]) if self._options["ttl"] else ()
        sets = ((b"SET", p.name.encode(), b"".join(p.parts), *expiry) for p in objects)
        return [answer == b"OK" for answer in self._ask(sets)]

    def get(self, objects: Sequence[Object]) -> list[bool]:
        answers = self._ask((b"GET", item.name.encode()) for item in objects)
        return [_fill(item, value) for item, value in zip(objects, answers, strict=True)]

    def remove(self, names: Sequence[str]) -> None:
        self._ask((b"UNLINK", name.encode()) for name in names)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _ask(self, commands: Iterable[tuple[bytes, ...]]) -> list[Any]:
        """The answers to commands sent together. A connection that failed is not used again."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self._options)
        try:
            answers = connection.ask(list(commands))
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answers


class _Connection:
    """Speaks the protocol of Redis."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._socket = socket.create_connection(
            (options["host"], options["port"]), options["timeout"]
        )
        self._reader = self._socket.makefile("rb")
        if options["password"]:
            self.ask([(b"AUTH", options["password"].encode())])

    def ask(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        for words in commands:  # Redis takes all of them before its answers are read
            text = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
            self._socket.sendall(b"*%d\r\n%b" % (len(words), text))
        return [self._answer() for _ in commands]

    def _answer(self) -> Any:
        kind, text = self._reader.read(1), self._reader.readline()[:-2]
        if kind == b"$":
            return None if text == b"-1" else self._reader.read(int(text) + 2)[:-2]
        if kind not in (b"+", b":"):
            raise ConnectionError(text.decode() or "the server went away")
        return text if kind == b"+" else int(text)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def _fill(item: Object, value: bytes | None) -> bool:
    fits = value is not None and len(value) == item.nbytes
    at = 0
    for part in item.parts if fits else ():
        part[:] = value[at : at + part.nbytes]
        at += part.nbytes
    return fits
