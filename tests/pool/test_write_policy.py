"""When a block is written below."""

from __future__ import annotations

from kvrecall.block import BlockKey
from kvrecall.config import Watermarks
from kvrecall.pool.host import Block
from kvrecall.pool.write_policy import STORE_TRIES, RemoteWriteBack, WriteBack, WriteSelective
from kvrecall.testing import chain, namespace
from kvrecall.testing.tier_contract import Bench
from kvrecall_lab.memory_tier import MemoryTier

SLOT = 4096


def made(keys: list[BlockKey]) -> dict[BlockKey, Block]:
    return {key: Block(key, None, 0, at * SLOT, SLOT) for at, key in enumerate(keys)}


def test_written_back_is_what_exceeds_the_high_mark_down_to_the_low_one() -> None:
    """The least recently used first, of a chain its end."""
    policy, keys = WriteBack(Watermarks(0.5, 0.4)), chain(namespace(), 6)
    blocks = made(keys)
    policy.committed(list(blocks.values()))
    assert list(policy.recalled(list(blocks.values()))) == []
    policy.touched(keys[4:])
    assert not policy.due(blocks, 12 * SLOT)
    due = policy.due(blocks, 10 * SLOT)
    assert [block.key for block in due] == [keys[3], keys[2]]
    for block in due:
        policy.settled(block.key)
    assert policy.unwritten_bytes == 4 * SLOT
    assert [block.key for block in policy.rest(blocks)] == [keys[1], keys[0], keys[5], keys[4]]
    blocks[keys[1]].tries = STORE_TRIES
    assert policy.due(blocks, 0) == [blocks[key] for key in (keys[0], keys[5], keys[4])]
    assert keys[1] not in policy, "what cannot be stored is given up"


def test_to_a_remote_tier_is_written_what_it_lacks() -> None:
    bench, keys = Bench(MemoryTier(), block_bytes=SLOT), chain(namespace(), 3)
    bench.tier.register(namespace(), SLOT)
    bench.put(keys[:1])
    policy, blocks = RemoteWriteBack(bench.tier, Watermarks(0.5, 0.4), lambda: 0.0), made(keys)
    policy.committed(list(blocks.values()))
    assert policy.leaving(list(blocks.values())) == [blocks[key] for key in keys[1:]]
    assert keys[0] not in policy
    policy.pause()
    assert list(policy.due(blocks, 0)) == []


def test_selected_is_what_is_likely_or_seen_again() -> None:
    keys = chain(namespace(), 3)
    policy, blocks = WriteSelective({keys[0]: 0.5, keys[1]: 0.4}.get), made(keys)
    assert policy.committed(list(blocks.values())) == [blocks[keys[0]]]
    assert policy.touched(keys[2:]) == keys[2:]
    assert policy.committed([blocks[keys[2]]]) == [blocks[keys[2]]]
