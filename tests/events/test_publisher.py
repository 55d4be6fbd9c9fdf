"""KV events of a pool service, read with vLLM's own classes and by the router's subscription."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from pool.service.service import Service
from pool.test_changes import OTHER, Action, actions, open_pool, play

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import ConfigError
from kvrecall.events import publisher as room
from kvrecall.events import wire
from kvrecall.events.holdings import Holdings
from kvrecall.events.publisher import EventPublisher, PoolEvents, endpoint_of
from kvrecall.events.subscriber import BatchOutcome, EventReader, Publisher, Subscription
from kvrecall.events.wire import encode, short_hash
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient
from kvrecall.processes.command import kvrecall
from kvrecall.processes.ports import two_ports
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine

MIB = 1 << 20
KV_EVENTS = "vllm.distributed.kv_events"


def hashes(keys: Iterable[BlockKey]) -> set[int]:
    return {short_hash(key[NAMESPACE_BYTES:]) for key in keys}


class Router:
    """Follows a pool of which some namespaces are live: an engine can recall their blocks."""

    def __init__(self, pool: Pool, most: int) -> None:
        self.live: dict[bytes, int] = {}
        self.events = PoolEvents(pool, lambda: self.live, most)
        self._reader = EventReader(Holdings())

    def read(self, repeat: bool = False) -> None:
        batch = encode(self.events.take(repeat))
        assert self._reader.take(self._reader.last + 1, batch) is BatchOutcome.APPLIED

    def known(self) -> set[tuple[TierName, int]]:
        self.read()
        while not self.events.is_complete:
            self.read()
        return {
            (tier, one)
            for tier in (TierName.HOST, TierName.DISK)
            for one in self._reader.holdings.hashes(tier)
        }


@given(actions("toggle"), st.integers(1, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_router_knows_what_an_engine_can_recall(
    tmp_path_factory: pytest.TempPathFactory, story: list[Action], most: int, with_disk: bool
) -> None:
    """Whatever happens in between: logs that overflow, namespaces that come and go."""
    with open_pool(tmp_path_factory.mktemp("pool") if with_disk else None) as pool:
        router = Router(pool, most)

        def act(action: str, which: int) -> None:
            digest = (NAMESPACE, OTHER)[which].digest
            if action != "toggle":
                router.read(repeat=action == "repeat")
            elif router.live.pop(digest, None) is None:
                router.live[digest] = which

        play(pool, story, act)
        there = {
            (block.tier, *hashes([block.key]))
            for block in pool.admin.blocks()
            if block.key[:NAMESPACE_BYTES] in router.live
        }
        assert router.known() == there


class Follower:
    """A subscription in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.known = Subscription(Publisher("127.0.0.1", port, port + 1), lambda _: None)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self.known.run())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.gather(self._task, return_exceptions=True))

    def held(self, tier: TierName) -> set[int]:
        """Asked in its thread: it may be changing."""

        async def ask() -> set[int]:
            return self.known.holdings.hashes(tier)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


@pytest.fixture
def port() -> int:
    return two_ports()


@pytest.fixture
def ending() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def follower(port: int, ending: contextlib.ExitStack) -> Follower:
    return ending.enter_context(contextlib.closing(Follower(port)))


@pytest.fixture
def socket_of(port: int, ending: contextlib.ExitStack) -> Callable[[int], zmq.Socket[bytes]]:
    """Connected to the publisher's port for sockets of that kind."""
    context = zmq.Context()
    ending.callback(context.destroy, linger=0)

    def connected(kind: int) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.connect(f"tcp://127.0.0.1:{port + (kind == zmq.DEALER)}")
        return made

    return connected


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    config = PoolConfig(8 * SLOT_BYTES, DiskConfig(tmp_path / "disk", 64 * MIB), policy="lru")
    with Pool.open(config) as made:
        yield made


Publish = Callable[..., EventPublisher]


@pytest.fixture
def publish(port: int) -> Iterator[Publish]:
    with contextlib.ExitStack() as ending:
        yield lambda pool, topic="": ending.enter_context(
            contextlib.closing(EventPublisher(pool, "127.0.0.1", port, topic))
        )


def save(pool: Any, name: str, count: int = 4) -> list[BlockKey]:
    pool.register(NAMESPACE, BLOCK_BYTES)
    keys = chain(NAMESPACE, count, name)
    Engine(pool).save(keys)
    assert pool.flush(keys, 30.0)
    return keys


def save_until_told(pool: Pool, sub: zmq.Socket[bytes]) -> list[BlockKey]:
    """Saves chains until the subscriber is told of one: its subscription takes effect when the
    publisher has seen it."""
    keys: list[BlockKey] = []
    while not sub.poll(200):
        assert len(keys) < 400, "nothing is published"
        keys += save(pool, f"a {len(keys)}")
    return keys


def agrees(follower: Follower, pool: Pool) -> Callable[[], bool]:
    def is_so() -> bool:
        host = hashes(one.key for one in pool.host_blocks())
        disk = hashes(one.key for one in pool.admin.blocks() if one.tier is TierName.DISK)
        return follower.held(TierName.HOST) == host and follower.held(TierName.DISK) >= disk

    return is_so


def test_a_late_reader_follows_a_pool_through_evictions_and_drops(
    pool: Pool,
    publish: Publish,
    port: int,
    follower: Follower,
    ending: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_KEPT_BATCHES", 2)
    publish(pool)
    first = save(pool, "a")
    keys = [*first, *(key for number in range(4) for key in save(pool, f"more {number}"))]
    late = ending.enter_context(contextlib.closing(Follower(port)))
    for reader in (follower, late):
        wait_until(lambda reader=reader: reader.held(TierName.DISK) == hashes(keys))
        wait_until(agrees(reader, pool))
        assert not hashes(first) & reader.held(TierName.HOST)
    pool.drop(first)
    wait_until(lambda: not hashes(first) & late.held(TierName.DISK))
    pool.clear()
    wait_until(lambda: not len(late.known.holdings))
    assert late.known.gaps == 0


def test_a_service_that_is_killed_and_comes_back(
    tmp_path: Path,
    port: int,
    follower: Follower,
    ending: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command; its host memory is lost, its disk is not. No temporary file is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "service"
    folder.mkdir(mode=0o700)
    socket = folder / "pool.sock"
    command = kvrecall("pool", "serve", "--socket", str(socket), "--host-size", "8MiB")
    command += ["--disk-path", str(folder / "disk"), "--disk-size", "64MiB", "--events", str(port)]

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        ending.callback(process.wait)
        ending.callback(process.kill)
        assert process.stdout is not None
        assert b"pool service on" in process.stdout.readline()
        return process

    process = started()
    with contextlib.closing(ServiceClient(socket, 60.0)) as client:
        keys = save(client, "a")
        wait_until(lambda: follower.held(TierName.HOST) == hashes(keys))
        wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
    process.kill()
    process.wait()
    assert [*tmp_path.iterdir()] == [folder]
    started()
    with contextlib.closing(ServiceClient(socket, 60.0)) as client:
        client.register(NAMESPACE, BLOCK_BYTES)
        wait_until(lambda: not follower.held(TierName.HOST))
        wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
    reader = follower.known.reader
    assert reader.restarts + reader.lost >= 1


def test_a_further_namespace_publishes_its_own_blocks(
    tmp_path: Path, publish: Publish, follower: Follower
) -> None:
    """Another engine joins, whose blocks are on disk: those of the first are not told again."""
    other = Namespace.of({"a": "other"})
    config = PoolConfig(32 * SLOT_BYTES, DiskConfig(tmp_path / "disk", 64 * MIB))
    with Pool.open(config) as pool:
        pool.register(other, BLOCK_BYTES)
        theirs = chain(other, 4, "theirs")
        Engine(pool).save(theirs)
        assert pool.flush(theirs, 30.0)
    with Pool.open(config) as pool, contextlib.closing(publish(pool)) as publisher:

        def settle(name: str) -> list[BlockKey]:
            """Until all that was taken from the log is published: a further block is told after
            it, of which some may not be counted yet."""
            wait_until(lambda: publisher._events.is_complete)
            keys = save(pool, name, 1)
            wait_until(lambda: hashes(keys) <= follower.held(TierName.HOST))
            wait_until(lambda: hashes(keys) <= follower.held(TierName.DISK))
            return keys

        ours = save(pool, "ours", 8)
        wait_until(lambda: follower.held(TierName.DISK) == hashes(ours))
        marks = settle("before")
        before = publisher._number
        pool.register(other, BLOCK_BYTES)
        wait_until(lambda: follower.held(TierName.DISK) == hashes(ours + marks + theirs))
        marks += settle("after")
        told = [
            block
            for _, payload in publisher._history.since(before)
            for event in msgspec.msgpack.decode(payload)[1]
            for block in event["block_hashes"]
            if block not in hashes(marks)
        ]
        assert sorted(told) == sorted(hashes(theirs))


def test_a_reader_that_asks_all_the_time_keeps_nothing_from_others(
    pool: Pool,
    publish: Publish,
    follower: Follower,
    socket_of: Callable[[int], zmq.Socket[bytes]],
    ending: contextlib.ExitStack,
) -> None:
    publish(pool)
    replay, is_over = socket_of(zmq.DEALER), threading.Event()

    def ask() -> None:
        """So that a request always waits."""
        for _ in range(100):
            replay.send_multipart((b"", (0).to_bytes(8, "big")))
        while not is_over.is_set():
            if replay.poll(100) and not replay.recv_multipart()[-1]:
                replay.send_multipart((b"", (0).to_bytes(8, "big")))

    thread = threading.Thread(target=ask, daemon=True)
    ending.callback(thread.join, 10)
    ending.callback(is_over.set)
    thread.start()
    keys = save(pool, "a")
    wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))


def test_a_service_publishes_the_tokens_that_engines_report(
    tmp_path: Path, port: int, socket_of: Callable[[int], zmq.Socket[bytes]]
) -> None:
    """Which it gets before or after the blocks. A block that was told without them leaves and is
    stored again: some readers count. Bytes that are no events change nothing."""
    space = Namespace.of({"block_size": "4+8", "group": "0: full"})
    keys = chain(space, 3, "a")
    first, *rest = [short_hash(key[NAMESPACE_BYTES:]) for key in keys]
    replay = socket_of(zmq.DEALER)

    def described(blocks: list[int], parent: int | None, **more: Any) -> bytes:
        event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent}
        event |= {"token_ids": [*range(4 * len(blocks))], "block_size": 4, "medium": "GPU", **more}
        return encode([event])

    def told() -> dict[tuple[str, int], list[Any]]:
        """Of each medium and block: how often it is stored, its tokens, parent, adapter, keys."""
        found: dict[tuple[str, int], list[Any]] = {}
        replay.send_multipart((b"", bytes(8)))
        while payload := replay.recv_multipart()[-1]:
            for event in msgspec.msgpack.decode(payload)[1]:
                parent, tokens = event.get("parent_block_hash"), event.get("token_ids", [])
                for at, block in enumerate(event["block_hashes"]):
                    one = found.setdefault((event["medium"], block), [0])
                    one[0] += 1 if event["type"] == "BlockStored" else -1
                    keys = event.get("extra_keys", [None] * 9)[at]
                    one[1:] = tokens[4 * at : 4 * at + 4], parent, event.get("lora_name"), keys
                    parent = block
        return found

    with (
        Service(tmp_path / "a", events=port) as service,
        contextlib.closing(service.client()) as client,
    ):
        client.register(space, BLOCK_BYTES)
        client.describe(described([first], None, extra_keys=[["salt"]], lora_name="x"))
        Engine(client).save(keys)
        assert client.flush(keys, 30.0)
        wait_until(lambda: len(told()) == 6)
        assert {one[0] for one in told().values()} == {1}
        assert told()["CPU", rest[0]][1:] == [[], first, None, None]
        client.describe(b"no events")
        client.describe(bytes(2 << 20))  # more than a service takes
        client.describe(encode([{"type": "BlockStored"}, {"type": "BlockStored", "medium": 7}]))
        client.describe(described(rest, first))
        want = [
            [1, [0, 1, 2, 3], None, "x", ["salt"]],
            [1, [0, 1, 2, 3], first, None, None],
            [1, [4, 5, 6, 7], rest[0], None, None],
        ]
        blocks = [(medium, one) for medium in ("CPU", "STORAGE") for one in (first, *rest)]
        wait_until(lambda: told() == dict(zip(blocks, want * 2, strict=True)))


def test_endpoints() -> None:
    assert endpoint_of("5601") == ("127.0.0.1", 5601)
    assert endpoint_of("*:5601") == ("*", 5601)
    for wrong in ("", "0", "65535", "host", "host:", "host:x", ":5601"):
        with pytest.raises(ConfigError, match="is not a port below 65535"):
            endpoint_of(wrong)


def test_a_port_that_is_taken(pool: Pool, port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(f"tcp://127.0.0.1:{port + 1}")
        with pytest.raises(ConfigError, match=f"cannot listen at.*'127.0.0.1', {port + 1}"):
            EventPublisher(pool, "127.0.0.1", port)


def test_a_topic_and_a_gap_that_is_no_longer_kept(
    pool: Pool,
    publish: Publish,
    follower: Follower,
    socket_of: Callable[[int], zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frames: with the topic, in order, and first those that void what a reader knew; vLLM's
    classes decode them, as its example of a subscriber does."""
    decode = msgspec.msgpack.Decoder(type=pytest.importorskip(KV_EVENTS).KVEventBatch).decode
    monkeypatch.setattr(room, "_KEPT_BATCHES", 4)
    monkeypatch.setattr(wire, "time", SimpleNamespace(time=lambda: 7.5))
    publisher = publish(pool, "kv-events")
    sub, replay = socket_of(zmq.SUB), socket_of(zmq.DEALER)
    sub.subscribe(b"kv-events")
    keys = save_until_told(pool, sub)
    topic, number, payload = sub.recv_multipart()
    batch = decode(payload)
    assert (topic, batch.data_parallel_rank) == (b"kv-events", 0)
    assert batch.ts == 7.5
    told = next(one for one in batch.events if one.medium == "CPU")
    assert set(told.block_hashes) <= hashes(keys)
    assert (told.parent_block_hash, told.token_ids, told.block_size) == (None, [], 0)
    assert (told.group_idx, told.locality, told.ownership) == (0, None, None)
    for number in range(12):
        before = publisher._number
        pool.drop(save(pool, f"b {number}", 1))
        wait_until(lambda before=before: publisher._number > before)
    wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
    published = publisher._number
    replay.send_multipart((b"", (2).to_bytes(8, "big")))
    replies: list[list[bytes]] = []
    while not replies or replies[-1][-1]:
        assert replay.poll(20_000)
        replies.append(replay.recv_multipart())
    numbers = [int.from_bytes(one[2], "big") for one in replies[:-1]]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[0] >= 2
    assert numbers[-1] >= published - 1, "up to the last"
    assert {one[1] for one in replies[:-1]} == {b"kv-events"}
    cleared, *first = decode(replies[0][-1]).events
    assert type(cleared).__name__ == "AllBlocksCleared"
    on_disk = {block for one in first if one.medium == "STORAGE" for block in one.block_hashes}
    assert on_disk >= hashes(keys)


# -- the gate -------------------------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[int]:
    """The port of a gate before a socket that publishes nothing."""
    context, port = zmq.Context(), two_ports()
    gate = room.EventGate([("127.0.0.1", port)])
    inner = context.socket(zmq.PUB)
    inner.bind(gate.inner[0])
    gate.seal()
    yield port
    context.destroy(linger=0)
    gate.close()


def greeted(port: int) -> socket.socket:
    """A connection that was answered, or ended."""
    reader = socket.create_connection(("127.0.0.1", port), 30)
    reader.recv(1)
    return reader


def test_who_sends_more_than_a_reader_is_cut_off(gate: int) -> None:
    async def sends_on() -> None:
        async with wire.zmtp_connection("127.0.0.1", gate, b"SUB") as reader:
            for _ in range(1000):
                await reader.send(b"\1" + bytes(200))
            async with asyncio.timeout(20):
                await reader.receive()

    with pytest.raises(ConnectionError):
        asyncio.run(sends_on())


def test_readers_are_bounded(
    gate: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A place is free again when a reader goes. The log has one line, however many come."""
    monkeypatch.setattr(room, "MOST_READERS", 2)
    first, second = greeted(gate), greeted(gate)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            greeted(gate).sendall(bytes(1 << 20))
    assert caplog.text.count("2 readers are connected") == 1
    first.close()

    def is_let_in() -> bool:
        with contextlib.suppress(ConnectionError), greeted(gate) as reader:
            return bool(reader.recv(1))
        return False

    wait_until(is_let_in)
    second.close()
