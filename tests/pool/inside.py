"""The insides of a pool, for the drivers and faults of other rooms' tests."""

from __future__ import annotations

from collections.abc import Sequence, Set

from kvrecall.block import BlockKey
from kvrecall.pool.changes import Cause
from kvrecall.pool.host import Block
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.tier import Tier


def blocks_of(pool: Pool) -> list[Block]:
    """The visible blocks of the host."""
    return list(pool._host.blocks.values())


def retired(pool: Pool) -> Set[bytes]:
    """The namespaces whose blocks go first."""
    return pool._host.retired


def leaving(pool: Pool) -> Sequence[BlockKey]:
    """Their blocks, the last one goes first."""
    return [*pool._host.leaving]


def below(pool: Pool) -> Tier:
    return pool._below


def retry_writes(pool: Pool) -> None:
    """The pool itself leaves blocks alone whose writes failed a few times."""
    for block in blocks_of(pool):
        block.tries = 0


def forget(pool: Pool, keys: Sequence[BlockKey]) -> None:
    """The host evicts these blocks."""
    with pool._changed:
        pool._evictor.drop(keys, Cause.CAPACITY)


def shrink(pool: Pool) -> None:
    """As ``kvrecall pool resize --host``, to a tenth and back: evicts what is not in use."""
    whole = pool._host.slots.limit_bytes
    pool.resize_host(whole // 10)
    while pool._evictor.trim(100):
        continue
    pool.resize_host(whole)


def life_of(client: ServiceClient) -> str | None:
    """Which life of the pool service a client is joined to, or about to join; None if to none."""
    life = client._next or client._life
    return None if life is None or life.is_lost else life.handle.boot


def is_answered(client: ServiceClient) -> bool:
    """Whether the service has answered why blocks are missing. No call waits for that; one that
    waits for a later answer reads it, too."""
    client.stats()
    asked = list(client._asked.values())
    return all(life.is_lost or number in life._replies for life, number in asked)
