"""KV events of a pool service, read with vLLM's own classes and by the router's subscription."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import ConfigError
from kvrecall.events import publisher as room
from kvrecall.events.publisher import EventPublisher, endpoint_of
from kvrecall.events.subscriber import Publisher, Subscription
from kvrecall.events.wire import short_hash
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient
from kvrecall.processes.command import kvrecall
from kvrecall.processes.ports import two_ports
from kvrecall.testing.blocks import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine

MIB = 1 << 20


def hashes(keys: list[BlockKey]) -> set[int]:
    return {short_hash(key[NAMESPACE_BYTES:]) for key in keys}


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
def pool(tmp_path: Path) -> Iterator[Pool]:
    config = PoolConfig(8 * SLOT_BYTES, DiskConfig(tmp_path / "disk", 64 * MIB), policy="lru")
    with Pool.open(config) as made:
        yield made


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
        host = {short_hash(one.key[NAMESPACE_BYTES:]) for one in pool.host_blocks()}
        disk = {
            short_hash(one.key[NAMESPACE_BYTES:])
            for one in pool.admin.blocks()
            if one.tier is TierName.DISK
        }
        return follower.held(TierName.HOST) == host and follower.held(TierName.DISK) >= disk

    return is_so


def test_vllms_classes_decode_what_is_published(pool: Pool, port: int) -> None:
    """As vLLM's example of a subscriber does."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    publisher = EventPublisher(pool, "127.0.0.1", port)
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    try:
        sub.connect(f"tcp://127.0.0.1:{port}")
        sub.subscribe(b"")
        keys = save_until_told(pool, sub)
        pool.drop(keys)
        events: list[Any] = []
        numbers: list[int] = []
        while not any(isinstance(one, BlockRemoved) and one.medium == "STORAGE" for one in events):
            assert sub.poll(20_000)
            topic, number, payload = sub.recv_multipart()
            assert topic == b""
            numbers.append(int.from_bytes(number, "big"))
            batch = decoder.decode(payload)
            assert abs(batch.ts - time.time()) < 60
            assert batch.data_parallel_rank == 0
            events += batch.events
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        stored = [one for one in events if isinstance(one, BlockStored) and one.medium == "CPU"]
        first = stored[0]
        assert set(first.block_hashes) <= hashes(keys)
        assert (first.parent_block_hash, first.token_ids, first.block_size) == (None, [], 0)
        assert (first.group_idx, first.locality, first.ownership) == (0, "LOCAL", None)
        assert {one.medium for one in events} == {"CPU", "STORAGE"}
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_reader_follows_a_pool_through_evictions_and_drops(pool: Pool, port: int) -> None:
    publisher = EventPublisher(pool, "127.0.0.1", port)
    follower = Follower(port)
    try:
        kept = save(pool, "a")
        for number in range(4):
            save(pool, f"more {number}")
        wait_until(agrees(follower, pool))
        assert hashes(kept) <= follower.held(TierName.DISK)
        assert not hashes(kept) & follower.held(TierName.HOST)
        pool.drop(kept)
        wait_until(lambda: not hashes(kept) & follower.held(TierName.DISK))
        pool.clear()
        wait_until(lambda: not len(follower.known.holdings))
        assert follower.known.gaps == 0
    finally:
        follower.close()
        publisher.close()


def test_a_late_reader_is_told_everything(
    pool: Pool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_KEPT_BATCHES", 2)
    publisher = EventPublisher(pool, "127.0.0.1", port)
    first = Follower(port)
    try:
        keys = [key for number in range(5) for key in save(pool, f"story {number}")]
        wait_until(lambda: first.held(TierName.DISK) == hashes(keys))
        late = Follower(port)
        try:
            wait_until(lambda: late.held(TierName.DISK) == hashes(keys))
            wait_until(agrees(late, pool))
        finally:
            late.close()
    finally:
        first.close()
        publisher.close()


def test_a_service_that_is_killed_and_comes_back(tmp_path: Path, port: int) -> None:
    """The command; its host memory is lost, its disk is not."""
    folder = tmp_path / "service"
    folder.mkdir(mode=0o700)
    socket = folder / "pool.sock"
    command = kvrecall("pool", "serve", "--socket", str(socket), "--host-size", "8MiB")
    command += ["--disk-path", str(folder / "disk"), "--disk-size", "64MiB", "--events", str(port)]

    def started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        assert b"pool service on" in process.stdout.readline()
        return process

    follower = Follower(port)
    process = started()
    try:
        with contextlib.closing(ServiceClient(socket, 60.0)) as client:
            keys = save(client, "a")
            wait_until(lambda: follower.held(TierName.HOST) == hashes(keys))
            wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = started()
        with contextlib.closing(ServiceClient(socket, 60.0)) as client:
            client.register(NAMESPACE, BLOCK_BYTES)
            wait_until(lambda: not follower.held(TierName.HOST))
            wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
        reader = follower.known.reader
        assert reader.restarts + reader.lost >= 1
    finally:
        follower.close()
        process.kill()
        process.wait()


def test_a_further_namespace_publishes_its_own_blocks(tmp_path: Path, port: int) -> None:
    """Another engine joins, whose blocks are on disk: those of the first are not told again."""
    other = Namespace.of({"a": "other"})
    config = PoolConfig(32 * SLOT_BYTES, DiskConfig(tmp_path / "disk", 64 * MIB))
    with Pool.open(config) as pool:
        pool.register(other, BLOCK_BYTES)
        theirs = chain(other, 4, "theirs")
        Engine(pool).save(theirs)
        assert pool.flush(theirs, 30.0)
    with Pool.open(config) as pool:
        publisher = EventPublisher(pool, "127.0.0.1", port)
        follower = Follower(port)

        def settle(name: str) -> list[BlockKey]:
            """Until all that was taken from the log is published: a further block is told after
            it, of which some may not be counted yet."""
            wait_until(lambda: publisher._events.is_complete)
            keys = save(pool, name, 1)
            wait_until(lambda: hashes(keys) <= follower.held(TierName.HOST))
            wait_until(lambda: hashes(keys) <= follower.held(TierName.DISK))
            return keys

        try:
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
        finally:
            follower.close()
            publisher.close()


def test_a_reader_that_asks_all_the_time_keeps_nothing_from_others(pool: Pool, port: int) -> None:
    publisher = EventPublisher(pool, "127.0.0.1", port)
    follower = Follower(port)
    context = zmq.Context()
    replay = context.socket(zmq.DEALER)
    is_over = threading.Event()

    def ask() -> None:
        """So that a request always waits."""
        for _ in range(100):
            replay.send_multipart((b"", (0).to_bytes(8, "big")))
        while not is_over.is_set():
            if replay.poll(100) and not replay.recv_multipart()[-1]:
                replay.send_multipart((b"", (0).to_bytes(8, "big")))

    thread = threading.Thread(target=ask, daemon=True)
    try:
        replay.connect(f"tcp://127.0.0.1:{port + 1}")
        thread.start()
        keys = save(pool, "a")
        wait_until(lambda: follower.held(TierName.DISK) == hashes(keys))
    finally:
        is_over.set()
        thread.join(10)
        follower.close()
        context.destroy(linger=0)
        publisher.close()


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
    pool: Pool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames: with the topic, in order, and first those that void what a reader knew."""
    monkeypatch.setattr(room, "_KEPT_BATCHES", 4)
    publisher = EventPublisher(pool, "127.0.0.1", port, "kv-events")
    context = zmq.Context()
    sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    follower = Follower(port)
    try:
        sub.connect(f"tcp://127.0.0.1:{port}")
        sub.subscribe(b"kv-events")
        replay.connect(f"tcp://127.0.0.1:{port + 1}")
        keys = save_until_told(pool, sub)
        assert sub.recv_multipart()[0] == b"kv-events"
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
        first = msgspec.msgpack.decode(replies[0][-1])[1]
        assert first[0]["type"] == "AllBlocksCleared"
        told = {h for one in first if one.get("medium") == "STORAGE" for h in one["block_hashes"]}
        assert told >= hashes(keys)
    finally:
        follower.close()
        context.destroy(linger=0)
        publisher.close()
