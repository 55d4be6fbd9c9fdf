"""What a publisher of KV events can repeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.events import history as room
from kvrecall.events.history import EventHistory

Json = dict[str, Any]
SIZE = 2
Known = dict[tuple[Any, ...], tuple[Any, ...]]


def encoded(events: list[Json]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 3])


def stored(medium: str, hashes: list[int], parent: int | None, tells: bool) -> Json:
    event: Json = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    event |= {"token_ids": [t for h in hashes for t in (h, 7)] if tells else []}
    event |= {"block_size": SIZE if tells else 0, "lora_id": None, "medium": medium}
    event |= {"group_idx": 0, "session_id": str(parent)}
    return event | ({"extra_keys": [("salt", h) for h in hashes]} if tells else {})


def removed(medium: str, hashes: list[int]) -> Json:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": 0}


def known_after(payloads: list[bytes]) -> Known:
    """Tokens, extra key and parent of each block, by medium and hash, as a reader learns them."""
    known: Known = {}
    for payload in payloads:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 3
        for event in events:
            if event["type"] == "AllBlocksCleared":
                known.clear()
                continue
            for at, block in enumerate(event["block_hashes"]):
                place = event["medium"], block
                if event["type"] == "BlockRemoved":
                    known.pop(place, None)
                    continue
                parent = event["block_hashes"][at - 1] if at else event["parent_block_hash"]
                tokens = event["token_ids"][at * SIZE : (at + 1) * SIZE]
                known[place] = tokens, (event.get("extra_keys") or [None] * 99)[at], parent
    return known


hashes = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
events = st.one_of(
    st.builds(lambda h, p: stored("GPU", h, p, True), hashes, st.none() | st.integers(0, 9)),
    st.builds(lambda h, p: stored("CPU", h, p, False), hashes, st.none() | st.integers(0, 9)),
    st.builds(removed, st.sampled_from(["GPU", "CPU"]), hashes),
    st.just({"type": "AllBlocksCleared"}),
)


@given(st.lists(st.lists(events, min_size=1, max_size=3), max_size=30), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_from_any_number_on_a_reader_knows_what_one_knows_that_read_all(
    story: list[list[Json]], keeps: int
) -> None:
    history = EventHistory(keeps)
    told: list[bytes] = []
    for number, batch in enumerate(story):
        told.append(encoded(batch))
        history.append((number, told[-1]))
    whole = known_after(told)
    for start in range(len(story)):
        read = list(history.since(start))
        numbers = [number for number, _ in read]
        assert numbers == list(range(numbers[0], len(story)))
        assert numbers[0] >= start
        before = told[:start] if numbers[0] == start else []
        assert known_after(before + [payload for _, payload in read]) == whole
    assert list(history.since(len(story))) == []


def test_a_long_story_takes_few_batches_with_parents_first() -> None:
    history = EventHistory(1)
    for number in range(5000):
        parent = None if number % 10 == 0 else number - 1
        history.append((number, encoded([stored("GPU", [number], parent, True)])))
    history.append((5000, encoded([removed("GPU", [17])])))
    history.append((5001, encoded([stored("GPU", [17], 16, True)])))
    history.append((5002, encoded([stored("CPU", [1], 0, False)])))
    read = list(history.since(0))
    assert len(read) <= 8
    seen: set[int] = set()
    for _, payload in read[:-1]:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                assert "session_id" not in event
                assert event["parent_block_hash"] in seen | {None}
                seen |= set(event["block_hashes"])
    assert len(seen) == 5000
    assert [number for number, _ in history.since(5002)] == [5002]
    assert [number for number, _ in history.since(5001)] == [5001, 5002]


def test_bytes_are_bounded_too() -> None:
    history = EventHistory(1000, 10_000)
    for number in range(200):
        history.append(
            (number, encoded([stored("CPU", list(range(number, number + 50)), 1, False)]))
        )
    told = [payload for _, payload in history.since(0)]
    assert sum(map(len, told)) < 30_000, "of 41 kB"
    assert len(known_after(told)) == 249


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known already stay, and can be told anew."""
    monkeypatch.setattr(room, "_MOST_BLOCKS", 5)
    history = EventHistory(1)
    for number in (*range(8), 2):
        history.append((number, encoded([stored("GPU", [number], None, number != 2)])))
    history.append((9, encoded([removed("GPU", [0])])))
    history.append((10, encoded([stored("GPU", [9], None, True)])))
    history.append((11, encoded([])))
    known = known_after([payload for _, payload in history.since(0)])
    assert {block for _, block in known} == {1, 2, 3, 4, 9}


# -- sockets --------------------------------------------------------------------------------

BATCHES = 4000  # of 5 kB: more than a socket and its connection take without a reader


@pytest.fixture(scope="module")
def long_story() -> EventHistory:
    told = EventHistory(BATCHES)
    for number in range(BATCHES):
        told.append((number, encoded([stored("CPU", [number], None, False)] * 40)))
    return told


@contextmanager
def asked(told: EventHistory) -> Iterator[tuple[zmq.Socket[bytes], threading.Thread]]:
    """A reader that has asked for everything, and the thread that answers it."""
    context = zmq.Context()
    replay, reader = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for one in (replay, reader):
        one.set_hwm(100)
    try:
        port = replay.bind_to_random_port("tcp://127.0.0.1")
        reader.connect(f"tcp://127.0.0.1:{port}")
        reader.send_multipart((b"", (0).to_bytes(8, "big")))
        thread = threading.Thread(target=told.replay, args=(replay, b"a topic"), daemon=True)
        thread.start()
        yield reader, thread
        thread.join(30)
        assert not thread.is_alive()
    finally:
        context.destroy(linger=0)


def test_a_reader_that_is_slow_gets_everything(
    long_story: EventHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that is full would leave the rest out."""
    monkeypatch.setattr(long_story, "_patience_s", room._PATIENCE_S)
    with asked(long_story) as (reader, thread):
        thread.join(0.5)
        assert thread.is_alive(), "it waits for the reader"
        numbers = []
        while (frames := reader.recv_multipart())[-1]:
            assert frames[1] == b"a topic"
            numbers.append(int.from_bytes(frames[2], "big"))
        assert numbers == list(range(BATCHES))


@pytest.mark.parametrize("before_s", [0.0, 1.0])
def test_a_reader_that_does_not_read_is_not_waited_for(
    long_story: EventHistory, monkeypatch: pytest.MonkeyPatch, before_s: float
) -> None:
    """Not for long, and not again and again: ``before_s`` seconds of patience, or none, because of
    those before it."""
    monkeypatch.setattr(room, "_PATIENCE_SHARE", 0.0)
    monkeypatch.setattr(long_story, "_patience_s", before_s)
    with asked(long_story) as (reader, thread):
        thread.join(30)
        assert not thread.is_alive()
        numbers = []
        while reader.poll(500):
            numbers.append(int.from_bytes(reader.recv_multipart()[2], "big"))
        assert numbers == list(range(len(numbers))), "what it got has no gap"
        assert 0 < len(numbers) < BATCHES


def test_patience_comes_back(long_story: EventHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_story, "_patience_s", 0.0)
    monkeypatch.setattr(long_story, "_patience_at", time.monotonic() - 1e6)
    with asked(long_story) as (reader, _):
        while reader.recv_multipart()[-1]:
            pass
    assert long_story._patience_s <= room._PATIENCE_S


def test_a_reader_that_goes_is_not_waited_for(
    long_story: EventHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_story, "_patience_s", room._PATIENCE_S)
    with asked(long_story) as (reader, thread):
        reader.poll(10_000)
        reader.close(linger=0)
        thread.join(4)
        assert not thread.is_alive(), "before its patience ends"
