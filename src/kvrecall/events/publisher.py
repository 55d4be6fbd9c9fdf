"""The KV events of a pool's changes; and the publisher of those of a pool service, which does as
vLLM's does, without vLLM.

A PUB socket sends batches, each of three frames: topic, number (8 bytes, big-endian), payload. A
ROUTER socket repeats the batches from a number on, and ends with an empty one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvrecall.addresses import split_address
from kvrecall.block import Namespace
from kvrecall.errors import ConfigError
from kvrecall.events.gate import EventGate
from kvrecall.events.history import EventHistory
from kvrecall.events.wire import Event, Hash, encode, events_of, short_hash
from kvrecall.pool.changes import MOST_CHANGES, ChangeLog
from kvrecall.pool.pool import Pool

_LOG = logging.getLogger(__name__)
_EVERY_MS = 50
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_BATCH_BLOCKS = 4096  # an event without any counts as ``_EVENT_BLOCKS``: a batch has about 60 KiB
_EVENT_BLOCKS = 16
_QUEUED = 1000  # batches for a subscriber that does not read; it asks for more than that again
_QUEUED_REPLAY = 16


def group_of(namespace: Namespace) -> int:
    """The KV group of a namespace's blocks."""
    name = dict(namespace.parts).get("group", "")
    number = name.partition(":")[0]
    return int(number) if number.isdecimal() else 0


def endpoint_of(text: str) -> tuple[str, int]:
    """Host and port of ``--events``: PORT or HOST:PORT. Raises ConfigError."""
    host, port = "127.0.0.1", text
    if not text.isdecimal():
        found = split_address(text)
        host, port = (found[0], str(found[1])) if found else ("", "0")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(
            f"--events: {text!r} is not a port below 65535; write PORT, or HOST:PORT for another "
            "address than 127.0.0.1 ('*' for all), e.g. 5601"
        )
    return host, int(port)


class PoolEvents:
    """Turns changes of a pool into KV events. Used by one thread.

    Publishes only whole blocks of live namespaces. What the pool held before is published once the
    first namespace is known, some of it with each call. When a namespace becomes live or is
    abandoned, its blocks alone are published, as stored or removed. If more changes come between
    two calls than the log keeps, everything is void and published again.
    """

    def __init__(
        self, pool: Pool, live: Callable[[], Mapping[bytes, int]], most: int = MOST_CHANGES
    ) -> None:
        """``live``: the KV group of each namespace whose blocks can be recalled now. ``most``:
        changes that are kept from one call to the next."""
        self._pool = pool
        self._live = live
        self._most = most
        self._groups: dict[bytes, int] = {}
        self._abandoned: dict[bytes, int] = {}  # groups of namespaces that were live
        self._log: ChangeLog | None = None

    def take(
        self, repeat: bool = False, hash_of: Callable[[bytes], Hash] = short_hash
    ) -> list[Event]:
        """Events since the last call, in order. ``repeat``: all blocks are reported once more.
        ``hash_of``: a hash as it is published."""
        live = self._live()
        if self._log is None:
            if not live:
                return []
            self._log = ChangeLog(self._pool.sweep, self._most)
            self._pool.watch(self._log)
        elif self._groups != live:
            self._abandoned |= {d: n for d, n in self._groups.items() if d not in live}
            self._log.repeat({digest for digest, _ in self._groups.items() ^ live.items()})
        if repeat:
            self._log.repeat()
        self._groups = dict(live)
        changes = self._log.take()
        return events_of(changes, self._groups, self._abandoned, self._pool.store_name, hash_of)

    @property
    def is_complete(self) -> bool:
        """Whether ``take`` has returned all that the pool held and all changes since."""
        return self._log is None or self._log.is_complete


class EventPublisher:
    """Publishes what enters and leaves a pool's tiers, in a thread of its own, until ``close``.

    What the pool holds when it begins is published first.
    """

    def __init__(self, pool: Pool, host: str, port: int, topic: str = "") -> None:
        """Listens at ``port`` and, for replay, the one above. Who reaches them learns the hashes of
        all blocks. ``topic``: of all batches. Raises ConfigError if it cannot."""
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--events needs pyzmq; install it with: pip install 'kvrecall[router]'"
            ) from error
        self._pool = pool
        try:
            self._gate = EventGate([(host, port), (host, port + 1)])
        except OSError as error:
            raise ConfigError(
                f"--events: cannot listen at {host}:{port} and the next port: {error.strerror}; "
                "use another port"
            ) from error
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_QUEUED)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(_QUEUED_REPLAY)
        for socket, inner in zip((self._pub, self._replay), self._gate.inner, strict=True):
            socket.set(zmq.LINGER, 500)
            socket.bind(inner)
        self._topic = topic.encode()
        self._history = EventHistory(_KEPT_BATCHES, _KEPT_BYTES)
        self._number = 0
        self._events = PoolEvents(pool, self._groups)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvrecall-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes what is left and ends. Idempotent."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                busy = self._publish()
                if self._replay.poll(0 if busy else _EVERY_MS):
                    self._history.replay(self._replay, self._topic)
            self._publish()
        except Exception:  # noqa: BLE001 - a thread that ends unseen would be believed
            _LOG.exception("pool service: publishing of KV events has ended")
        finally:
            self._context.destroy(linger=500)
            self._gate.close()

    def _groups(self) -> dict[bytes, int]:
        return {space.digest: group_of(space) for space, _ in self._pool.namespaces()}

    def _publish(self) -> bool:
        """One batch of what has changed. Whether there may be more at once."""
        for batch in batches_of(self._events.take()):
            payload = encode(batch)
            self._pub.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
            self._history.append((self._number, payload))
            self._number += 1
        return not self._events.is_complete


def batches_of(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Events in batches of a bounded size, because queues are bounded by the number of batches."""
    batch: list[Event] = []
    room = _BATCH_BLOCKS
    for event in events:
        size = _EVENT_BLOCKS + len(event.get("block_hashes", ()))
        if batch and size > room:
            yield batch
            batch, room = [], _BATCH_BLOCKS
        batch.append(event)
        room -= size
    if batch:
        yield batch
