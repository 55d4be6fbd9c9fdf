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


def told(block: int, medium: str | None = "GPU") -> bytes:
    event = {"type": "BlockStored", "block_hashes": [block], "token_ids": [1, 2], "block_size": 2}
    return encode([{**event, "medium": medium}])


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
    """Those used last stay."""
    monkeypatch.setattr(contents, "_MOST_BLOCKS", 2)
    known = Contents()
    for block in (7, 8, 7, 9):
        known.learn(told(block))
    assert known.stored(NAME, STORED) is not None
    assert known.stored((0, 8), STORED) is None
