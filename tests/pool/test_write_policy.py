"""When a block is written below."""

from __future__ import annotations

from kvrecall.config import Watermarks
from kvrecall.pool.host import Block
from kvrecall.pool.write_policy import WriteBack
from kvrecall.testing import chain, namespace

SLOT = 4096


def test_written_back_is_what_exceeds_the_high_mark_down_to_the_low_one() -> None:
    """The least recently used first, of a chain its end."""
    policy, keys = WriteBack(Watermarks(0.5, 0.4)), chain(namespace(), 6)
    blocks = {key: Block(key, None, 0, at * SLOT, SLOT) for at, key in enumerate(keys)}
    policy.committed(list(blocks.values()))
    policy.touched(keys[4:])
    assert not policy.due(blocks, 12 * SLOT)
    due = policy.due(blocks, 10 * SLOT)
    assert [block.key for block in due] == [keys[3], keys[2]]
    for block in due:
        policy.settled(block.key)
    assert policy.unwritten_bytes == 4 * SLOT
    assert [block.key for block in policy.rest(blocks)] == [keys[1], keys[0], keys[5], keys[4]]
