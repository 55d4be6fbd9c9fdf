"""The KV events of a pool's changes; and the publisher of those of a pool service, which does as
vLLM's does, without vLLM.

A PUB socket sends batches, each of three frames: topic, number (8 bytes, big-endian), payload. A
ROUTER socket repeats the batches from a number on, and ends with an empty one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
from array import array
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName, is_tail
from kvrecall.config import split_address
from kvrecall.errors import ConfigError
from kvrecall.events.contents import BlockContent, Contents
from kvrecall.events.history import EventHistory
from kvrecall.events.wire import CLEARED, MEDIA, REMOVED, STORED, Event, Hash, encode, short_hash
from kvrecall.pool.changes import MOST_CHANGES, Change, ChangeLog, Restart, Stored
from kvrecall.pool.pool import Pool

_LOG = logging.getLogger(__name__)
_EVERY_MS = 50
_KEPT_BATCHES = 10_000
_KEPT_BYTES = 64 << 20
_BATCH_BLOCKS = 4096  # an event without any counts as ``_EVENT_BLOCKS``: a batch has about 60 KiB
_EVENT_BLOCKS = 16
_QUEUED = 1000  # batches for a subscriber that does not read; it asks for more than that again
_QUEUED_REPLAY = 16
_DESCRIBED = 256  # batches of engines that are not read yet, of at most 1 MiB
_MOST, _MOST_TOKENS = 4096, 1 << 17  # blocks and tokens of an event
_KINDS = {"window": "sliding_window", "state": "mamba"}  # of KV groups, as vLLM names them


def group_of(namespace: Namespace) -> tuple[int, Event]:
    """The KV group of a namespace's blocks, and the fields that say what they are."""
    parts = dict(namespace.parts)
    name, _, kind = parts.get("group", "").partition(": ")
    number = int(name) if name.isdecimal() else 0
    size = (parts.get("block_size", "").split("+") + [""] * number)[number]
    about: Event = {"block_size": int(size) if size.isdecimal() else 0, "lora_id": None}
    kind = _KINDS.get(kind.partition(" ")[0], "full_attention")
    return number, about | {"lora_name": None, "kv_cache_spec_kind": kind}


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

    ``contents``: learns the tokens of blocks from the events of devices. A block is published with
    them, or once more when they become known.
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
        self._facts: dict[bytes, tuple[int, Mapping[str, Any]]] = {}
        self._log: ChangeLog | None = None
        self._late: dict[tuple[TierName, BlockKey], Stored] = {}  # blocks that wait for a parent
        self._children: dict[BlockKey, list[tuple[TierName, BlockKey]]] = {}  # those, by it
        self._told: set[BlockKey] = set()
        self.contents = Contents()

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
            self.contents.cleared()
        if self._groups != live:
            spaces = {space.digest: group_of(space)[1] for space, _ in self._pool.namespaces()}
            self._facts = {one: (number, spaces[one]) for one, number in live.items()}
        self._groups = dict(live)
        was_sweeping, changes = self._log.is_sweeping, self._log.take()
        if was_sweeping or self._log.is_sweeping or Restart.RESTART in changes[:1]:
            changes = self._parents_first(changes)
        changes = [*self.contents.completed(), *changes]
        return events_of(
            changes, self._facts, self._abandoned, self._pool.store_name, hash_of, self.contents
        )

    def _parents_first(self, changes: Iterable[Change]) -> list[Change]:
        """While all that the pool holds is told, in no order, a block waits for its parent: some
        readers drop blocks whose parents they do not know."""
        ready: list[Change] = []
        late, children, told = self._late, self._children, self._told
        for change in changes:
            if isinstance(change, Restart):
                late.clear()
                told.clear()
            elif isinstance(change, Stored):
                above, place = change.parent, (change.tier, change.key)
                is_inner = above is not None and above.startswith(change.key[:NAMESPACE_BYTES])
                if above is not None and is_inner and above not in told:
                    late[place] = change
                    children.setdefault(above, []).append(place)
                    continue
                following = [change]
                while following:
                    ready.append(one := following.pop())
                    told.add(one.key)
                    below = children.pop(one.key, ())
                    following += [late.pop(place) for place in below if place in late]
                continue
            else:
                late.pop((change.tier, change.key), None)
            ready.append(change)
        if self._log is None or not self._log.is_sweeping:
            ready += late.values()
            for known in (late, children, told):
                known.clear()
        return ready

    @property
    def is_complete(self) -> bool:
        """Whether ``take`` has returned all that the pool held and all changes since."""
        return self._log is None or self._log.is_complete


def events_of(
    changes: Iterable[Change],
    groups: Mapping[bytes, tuple[int, Mapping[str, Any]]],
    abandoned: Mapping[bytes, int] | None = None,
    store: str | None = None,
    hash_of: Callable[[bytes], Hash] = short_hash,
    contents: Contents | None = None,
) -> list[Event]:
    """The events of a pool's changes, as few as their order allows: a chain stored in one tier is
    one event, and so are removals that follow each other.

    Leaves out unfinished blocks, and those of namespaces that are in neither mapping; ``groups``:
    the KV group of each, and what events say of it. Blocks of ``abandoned`` namespaces are removed,
    whatever their change was. ``store``: names the remote store. ``hash_of``: a hash as it is
    published.
    """
    contents = contents or Contents()
    abandoned = abandoned or {}
    events: list[Event] = []
    hashes: list[Hash] = []  # of the last event
    tokens: list[int] = []
    extras: list[Any] = []
    goes_on: tuple[Any, ...] | None = None  # what a further block of it has
    for change in changes:
        if isinstance(change, Restart):
            events.append({"type": CLEARED})
            goes_on = None
            contents.cleared()
            continue
        digest, block = change.key[:NAMESPACE_BYTES], change.key[NAMESPACE_BYTES:]
        group, about = groups.get(digest, (abandoned.get(digest), None))
        if group is None or is_tail(change.key):
            continue
        name, published = (group, short_hash(block)), hash_of(block)
        content = None
        if about is None or not isinstance(change, Stored):
            contents.removed(name, change)
        elif (content := contents.stored(name, change)) is not None:
            if isinstance(published, int) and isinstance(content.parent, bytes):
                content = msgspec.structs.replace(content, parent=short_hash(content.parent))
        else:
            above = change.parent
            is_inner = above is not None and above[:NAMESPACE_BYTES] == digest
            parent = hash_of(above[NAMESPACE_BYTES:]) if above and is_inner else None
            content = BlockContent(parent, about)
        kind = change.tier, digest, content and (content.about, bool(content.tokens))
        is_full = len(hashes) >= _MOST or len(tokens) >= _MOST_TOKENS
        if kind != goes_on or is_full or (content and content.parent != hashes[-1]):
            hashes, tokens, extras, goes_on = [], [], [], kind
            event: Event = {"type": STORED if content else REMOVED, "block_hashes": hashes}
            if content:
                event |= {"parent_block_hash": content.parent, "token_ids": tokens}
                event |= {"extra_keys": extras, **content.about}
            events.append(event | _place(change.tier, digest, group, store))
        hashes.append(published)
        if content:
            tokens += array("I", content.tokens)
            extras.append(content.extra)
    for event in events:
        if not any(one is not None for one in event.get("extra_keys", ())):
            event.pop("extra_keys", None)
    return events


def _place(tier: TierName, digest: bytes, group: int, store: str | None) -> Event:
    place: Event = {"medium": MEDIA[tier], "group_idx": group}  # no locality: it is this host
    if tier is TierName.REMOTE:
        place["locality"] = "REMOTE"
        if store is not None:  # equal for all engines and hosts that can recall these blocks
            place["ownership"] = f"{store}/{digest.hex()[:8]}"
    return place


class EventPublisher:
    """Publishes what enters and leaves a pool's tiers, in a thread of its own, until ``close``.

    What the pool holds when it begins is published first.
    """

    def __init__(self, pool: Pool, host: str, port: int, topic: str = "") -> None:
        """Listens at ``port`` and, for replay, the one above. Who reaches them learns the tokens of
        prompts. ``topic``: of all batches. Raises ConfigError if it cannot."""
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
        for own, inner in zip((self._pub, self._replay), self._gate.inner, strict=True):
            own.set(zmq.LINGER, 500)
            own.bind(inner)
        self._gate.seal()
        self._topic = topic.encode()
        self._history = EventHistory(_KEPT_BATCHES, _KEPT_BYTES)
        self._number = 0
        self._events = PoolEvents(pool, self._groups)
        self._described = deque[bytes](maxlen=_DESCRIBED)
        pool.describe = self._described.append
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
        return {space.digest: group_of(space)[0] for space, _ in self._pool.namespaces()}

    def _publish(self) -> bool:
        """One batch of what has changed. Whether there may be more at once."""
        while self._described:
            self._events.contents.learn(self._described.popleft())
        for batch in batches_of(self._events.take()):
            payload = encode(batch)
            self._pub.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
            self._history.append((self._number, payload))
            self._number += 1
        return not self._events.is_complete


def batches_of(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Events in batches of a bounded size, because queues are bounded by the number of batches.
    Those with a locality have their own, as some readers drop a batch with such an event."""
    for _, alike in itertools.groupby(events, lambda event: event.get("locality")):
        batch: list[Event] = []
        room = _BATCH_BLOCKS
        for event in alike:
            size = _EVENT_BLOCKS + len(event.get("block_hashes", ()))
            size += len(event.get("token_ids", ())) // 4
            if batch and size > room:
                yield batch
                batch, room = [], _BATCH_BLOCKS
            batch.append(event)
            room -= size
        yield batch


MOST_READERS = 32
"""Connections at a time, over all ports of a publisher."""
MOST_SENT = 64 << 10
"""Bytes that a reader may send over one connection; a subscription or a request takes about a
hundred, so that one who sends more is no reader, or comes again."""
_CHUNK = 64 << 10
_GOODBYE_S = 1.0


class EventGate:
    """Stands between TCP ports and the ZeroMQ sockets of a publisher, until ``close``, in a thread
    of its own.

    ZeroMQ keeps what a peer sends without a bound: parts of a message that never ends, one
    subscription after another. So it listens where only the gate reaches it, which passes bytes
    on: all that the publisher sends, as fast as a reader takes it, and little in the other
    direction. ``inner``: where the sockets behind it bind, in ZeroMQ's notation, one for each
    address; then ``seal``."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        """``addresses``: host ("*": all of IPv4) and port. Raises OSError if it cannot listen at
        one."""
        self._readers = 0
        self._silent_until = 0.0
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
        self._doors: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listeners,), name="kvrecall-events-gate", daemon=True
        )
        self._thread.start()

    def seal(self) -> None:
        """Removes the names of the sockets behind it, once they are bound: they go on listening,
        no other user can connect, and a killed process leaves nothing behind."""
        self._doors = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in self._paths]
        self._paths[:] = [f"/proc/self/fd/{door}" for door in self._doors]
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Passes on what the sockets behind it sent before they closed, for a second."""
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        for door in self._doors:
            os.close(door)
        shutil.rmtree(self._folder, ignore_errors=True)  # where nothing was bound

    def _run(self, listeners: Sequence[socket.socket]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listeners))

    async def _serve(self, listeners: Sequence[socket.socket]) -> None:
        servers = [
            await asyncio.start_server(partial(self._admit, number), sock=listener)
            for number, listener in enumerate(listeners)
        ]
        await self._ending.wait()
        for server in servers:
            server.close()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        if passing:
            await asyncio.wait(passing, timeout=_GOODBYE_S)

    async def _admit(self, number: int, reader: StreamReader, writer: StreamWriter) -> None:
        if self._readers >= MOST_READERS:
            writer.transport.abort()
            if (now := self._loop.time()) >= self._silent_until:
                self._silent_until = now + 60.0  # a stranger can come again and again
                _LOG.warning("KV events: %d readers are connected; more are refused", MOST_READERS)
            return
        self._readers += 1
        inner: StreamWriter | None = None
        try:
            back, inner = await asyncio.open_unix_connection(self._paths[number])
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
