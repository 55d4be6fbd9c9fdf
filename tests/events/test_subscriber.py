"""Subscriptions to vLLM's own publisher, over real sockets: gaps, restarts, late joins."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvrecall.block import TierName
from kvrecall.engines.base import ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.events import subscriber
from kvrecall.events.history import EventHistory
from kvrecall.events.holdings import HashRule, Holdings
from kvrecall.events.subscriber import BatchOutcome, EventReader, Publisher, Subscription
from kvrecall.events.wire import REMOVED, STORED, encode
from kvrecall.processes.ports import free_port
from kvrecall.server.checks import check_port
from kvrecall.testing import wait_until

kv_events = pytest.importorskip("vllm.distributed.kv_events")
of_vllm = pytest.importorskip("kvrecall.engines.vllm.compat.events")


def is_free(port: int) -> bool:
    try:
        check_port("0.0.0.0", port)
    except ConfigError:
        return False
    return True


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


Publish = Callable[..., Any]


@pytest.fixture
def ports() -> Publisher:
    return Publisher("127.0.0.1", free_port(), free_port())


@pytest.fixture
def publisher(ports: Publisher) -> Iterator[Publish]:
    """Publishers at the ports, once these are free: ZeroMQ closes those of the one before in a
    thread of its own. ``whole``: vLLM's, as its scheduler makes one after the connector has said
    that it publishes."""
    endpoint, replay = f"tcp://*:{ports.port}", f"tcp://*:{ports.replay_port}"
    factory = kv_events.EventPublisherFactory
    before = factory._registry
    with ExitStack() as ending:

        def start(keeps: int = 10_000, whole: bool = False) -> Any:
            wait_until(lambda: all(map(is_free, (ports.port, ports.replay_port))))
            if whole:
                of_vllm.replay_everything()
                config = kv_events.KVEventsConfig(
                    enable_kv_cache_events=True,
                    publisher="zmq",
                    endpoint=endpoint,
                    replay_endpoint=replay,
                    buffer_steps=keeps,
                    topic="a topic",
                )
                made = factory.create(config)
                factory._registry = before
            else:
                made = kv_events.ZmqEventPublisher(
                    0, endpoint=endpoint, replay_endpoint=replay, buffer_steps=keeps
                )
            ending.callback(made.shutdown)
            return made

        yield start


def stored(hashes: list[int], **more: Any) -> Any:
    fields = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None}
    fields |= {"medium": "CPU", "lora_name": None}
    return kv_events.BlockStored(block_hashes=hashes, **(fields | more))


def removed(block: int, medium: str = "CPU") -> Any:
    return kv_events.BlockRemoved(block_hashes=[block], medium=medium)


def publish(of: Any, *events: Any) -> None:
    of.publish(kv_events.KVEventBatch(ts=time.time(), events=list(events)))


@asynccontextmanager
async def following(ports: Publisher) -> AsyncGenerator[Subscription, None]:
    subscription = Subscription(ports, lambda _: None)
    task = asyncio.create_task(subscription.run())
    try:
        yield subscription
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def of_host(kind: str, *blocks: int) -> bytes:
    more = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None}
    event = {"type": kind, "block_hashes": list(blocks), "medium": "CPU"}
    return encode([event | more if kind == STORED else event])


def test_batches_count_in_order_and_once() -> None:
    """What is known is never more than what the publisher held."""
    reader, here = EventReader(Holdings()), of_host(STORED, 1)
    assert reader.take(0, here) is BatchOutcome.APPLIED
    assert reader.take(1, of_host(REMOVED, 1)) is BatchOutcome.APPLIED
    assert reader.take(0, here) is reader.take(1, here) is BatchOutcome.KNOWN
    assert reader.take(3, here) is BatchOutcome.GAP
    assert reader.take(2, b"nonsense") is BatchOutcome.UNREADABLE
    assert len(reader.holdings) == 0
    assert reader.take(2, here) is BatchOutcome.APPLIED
    reader.skip_to(3)
    assert (len(reader.holdings), reader.lost) == (1, 0), "none is missing"
    reader.skip_to(9)
    assert (len(reader.holdings), reader.lost) == (0, 1)
    assert reader.take(9, here) is BatchOutcome.APPLIED


@in_a_loop
async def test_a_replay_that_does_not_go_on_is_none(ports: Publisher) -> None:
    context = zmq.asyncio.Context()
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    live.bind(f"tcp://127.0.0.1:{ports.port}")
    replay.bind(f"tcp://127.0.0.1:{ports.replay_port}")
    try:
        async with following(ports) as known:
            name = (await replay.recv_multipart())[0]
            told = [(0, of_host(STORED, 1)), (0, of_host(STORED, 2)), ((1 << 64) - 1, b"")]
            for number, payload in told:
                await replay.send_multipart((name, b"", b"", number.to_bytes(8, "big"), payload))
            await until(lambda: known.reader.lost == 1)
            assert len(known.holdings) == 0
    finally:
        context.destroy(linger=0)


@in_a_loop
async def test_what_a_publisher_still_keeps_is_replayed(
    ports: Publisher, publisher: Publish
) -> None:
    engine = publisher(keeps=3)
    for number in range(8):
        publish(engine, stored([number]))
    publish(engine, stored([8, 9]))
    publish(engine, removed(8))
    # vLLM's publisher sends from a thread of its own.
    wait_until(lambda: list(engine._buffer)[-1:] and engine._buffer[-1][0] == 9)
    async with following(ports) as known:
        await until(lambda: known.holdings.hashes(TierName.HOST) == {7, 9})
        publish(engine, stored([3], medium="GPU"))
        await until(lambda: known.holdings.hashes(TierName.DEVICE) == {3})
        assert (known.gaps, known.reader.lost) == (0, 0)


@in_a_loop
async def test_a_publisher_that_comes_later_and_comes_back(
    ports: Publisher, publisher: Publish
) -> None:
    async with following(ports) as known:
        first = publisher()
        for number in range(5):
            publish(first, stored([number]))
        await until(lambda: len(known.holdings) == 5)
        first.shutdown()
        second = publisher()  # it reaches the same numbers before anyone is connected again
        for number in range(5):
            publish(second, stored([100 + number]))
        await until(lambda: known.reader.restarts == 1)
        publish(second, stored([105]))
        await until(lambda: known.holdings.hashes(TierName.HOST) == set(range(100, 106)))


@in_a_loop
async def test_late_readers_and_lost_batches_with_our_replay(
    ports: Publisher, publisher: Publish
) -> None:
    """What the publisher no longer keeps as it was is known nevertheless, and how it hashes."""
    rule, tokens = HashRule("sha256_cbor", 4), [5, 6, 7, 8]
    (root,) = rule.chain(tokens)
    wanted = {root, 1000, *range(20, 2000, 20)}
    engine = publisher(keeps=3, whole=True)
    publish(engine, stored([root], token_ids=tokens, block_size=4, medium="GPU"))
    for number in range(1, 2000):
        publish(engine, stored([number]))
        if number % 20:
            publish(engine, removed(number))
    publish(engine, stored([root]))
    async with following(ports) as late:
        await until(lambda: late.holdings.hashes(TierName.HOST) == wanted)
        assert late.holdings.hashes(TierName.DEVICE) == {root}
        assert late.holdings.rule == rule
        late.reader.last -= 1500  # as if it had slept
        late.reader.last_ts -= 1
        publish(engine, removed(root, "GPU"))
        await until(lambda: late.reader.lost + late.reader.restarts == 1)
        await until(lambda: late.holdings.hashes(TierName.HOST) == wanted)
        await until(lambda: not late.holdings.hashes(TierName.DEVICE))
        assert late.holdings.rule == rule
        publish(engine, stored([3]))
        await until(lambda: late.holdings.hashes(TierName.HOST) == wanted | {3})


@in_a_loop
async def test_a_publisher_that_needs_long_for_a_replay_is_waited_for(
    ports: Publisher, publisher: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is there. Without an answer all that it held before would stay unknown."""
    monkeypatch.setattr(subscriber, "_REPLAY_S", 0.2)
    since = EventHistory.since

    def slow(self: EventHistory, start: int) -> Iterator[tuple[int, bytes]]:
        time.sleep(1)
        return since(self, start)

    monkeypatch.setattr(EventHistory, "since", slow)
    engine = publisher(keeps=100, whole=True)
    for number in range(10):
        publish(engine, stored([number]))
    wait_until(lambda: len(engine._history._kept) == 10)
    async with following(ports) as known:
        await until(lambda: known.holdings.hashes(TierName.HOST) == {*range(10)})
        assert known.reader.lost == 0


@in_a_loop
async def test_the_way_of_hashing_is_learned(ports: Publisher, publisher: Publish) -> None:
    rule, tokens = HashRule("sha256_cbor", 4), [5, 6, 7, 8]
    (first,) = rule.chain(tokens, "salt")
    engine = publisher()
    told: dict[str, Any] = {"token_ids": tokens, "block_size": 4, "medium": "GPU"}
    publish(engine, stored([first], **told, extra_keys=[("salt",)]))
    async with following(ports) as known:
        await until(lambda: known.holdings.rule == rule)
        publish(engine, stored([12345], **told))
        await until(lambda: known.holdings.unknown_rule)
        assert known.holdings.rule is None


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_events_are_published_where_the_server_listens(ports: Publisher) -> None:
    """vLLM's default is every address of the machine, and no key."""

    from kvrecall.engines.vllm.serving.app import parse_args

    def published(host: str, words: dict[str, object]) -> Any:
        words = {"enable_kv_cache_events": True, **words}
        options = ("--kv-events-config", json.dumps(words))
        return parse_args(ServeSpec("m", host, 1, {}, extra_args=options)).kv_events_config

    assert published("127.0.0.1", {}).endpoint == "tcp://[::ffff:127.0.0.1]:5557"
    assert published("127.0.0.1", {}).replay_endpoint is None
    both = {"endpoint": f"tcp://*:{ports.port}", "replay_endpoint": f"tcp://*:{ports.replay_port}"}
    for host, reached in (("localhost", False), ("0.0.0.0", True)):
        settings = published(host, both)
        wait_until(lambda: all(map(is_free, (ports.port, ports.replay_port))))
        made = kv_events.ZmqEventPublisher(
            0, endpoint=settings.endpoint, replay_endpoint=settings.replay_endpoint
        )
        try:
            for port in (ports.port, ports.replay_port):
                assert connects("127.0.0.1", port)
                assert connects("127.0.0.2", port) is reached
        finally:
            made.shutdown()
    for own in ("tcp://[::ffff:10.0.0.5]:1", "tcp://collector:5557", "ipc:///tmp/x"):
        assert published("127.0.0.1", {"endpoint": own}).endpoint == own
    with pytest.raises(ConfigError, match="::1 is not an IPv4 address; give the address"):
        published("::1", {})


def test_an_engine_hears_what_it_publishes_and_keeps_localities_apart(publisher: Publish) -> None:
    heard: list[bytes] = []
    of_vllm.listen(heard.append)
    try:
        remote = stored([3], locality="REMOTE", ownership="store")
        publish(publisher(whole=True), stored([1]), stored([2]), remote, removed(1))
        wait_until(lambda: len(heard) == 3)
    finally:
        of_vllm.listen(len)
    batches = [kv_events.msgspec.msgpack.decode(one)[1] for one in heard]
    blocks = [[one["block_hashes"] for one in batch] for batch in batches]
    assert blocks == [[[1], [2]], [[3]], [[1]]]
