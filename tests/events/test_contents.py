"""What is known of blocks' contents, and which were published without."""

from __future__ import annotations

import pytest

from kvrecall.block import BlockKey, TierName
from kvrecall.events import contents
from kvrecall.events.contents import Contents
from kvrecall.events.wire import encode
from kvrecall.pool.changes import Cause, Removed, Stored

KEY = BlockKey(bytes(31) + b"\7")
STORED = Stored(TierName.DISK, KEY, None)
NAME = 0, 7


def told(block: int, medium: str | None = "GPU", **more: object) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [block], "token_ids": [1, 2], "block_size": 2}
    return encode([{**event, "medium": medium, **more}])


def test_what_left_meanwhile_is_not_told_again() -> None:
    known = Contents()
    assert known.stored(NAME, STORED) is None
    known.removed(NAME, Removed(TierName.DISK, KEY, Cause.CAPACITY))
    known.learn(told(7))
    assert known.completed() == []
    content = known.stored(NAME, STORED)
    assert content is not None
    assert (content.parent, content.tokens) == (None, bytes((1, 0, 0, 0, 2, 0, 0, 0)))
    other = Contents()
    other.stored(NAME, STORED)
    other.learn(told(7, "CPU"))  # of a pool: nothing new
    assert other.completed() == []
    other.learn(told(7, None))
    assert other.completed() == [Removed(TierName.DISK, KEY, Cause.LOST), STORED]
    assert other.completed() == []


def test_what_leaves_after_its_tokens_were_told_is_not_told_again() -> None:
    """The thread that learns them does not wait for the one that publishes."""
    known = Contents()
    known.stored(NAME, STORED)
    known.learn(told(7))
    known.removed(NAME, Removed(TierName.DISK, KEY, Cause.CAPACITY))
    assert known.completed() == []


def test_contents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, as clients of a service may report anything. Those used last stay."""
    monkeypatch.setattr(contents, "_MOST_BYTES", 1100)
    known = Contents()
    for block in (7, 8, 7, 9):
        known.learn(told(block))
    assert known.stored(NAME, STORED) is not None
    assert known.stored((0, 8), STORED) is None
    known.learn(told(8, parent_block_hash=bytes(40)))
    assert known.stored(NAME, STORED) is None, "a long hash takes room"
    assert known.stored((0, 8), STORED) is None, "or is too long itself"
    for odd in ({"lora_name": "x" * 600}, {"parent_block_hash": [1]}):
        known.learn(told(7, **odd))
        assert known.stored(NAME, STORED) is None


def test_each_event_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "_MOST_ABOUTS", 3)
    known = Contents()
    for number in range(20):
        known.learn(told(number, lora_name=f"adapter {number}"))
    assert len(known._abouts._known) <= 3
    content = known.stored((0, 2), STORED)
    assert content is not None
    assert content.about["lora_name"] == "adapter 2"
