"""What a tier counts as it goes, counted by hand. Under the tier's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvrecall.pool.disk.catalog import Catalog, SlabUse
from kvrecall.pool.disk.slabs import slab_of
from kvrecall.pool.eviction import EvictionPolicy
from kvrecall.pool.eviction.hazard import HazardPolicy
from kvrecall.pool.eviction.queues import QueuePolicy
from kvrecall.pool.residents import Resident, Residents


def idle(block: Resident) -> bool:
    return not (block.leases or block.io_refs or block.pinned)


def count_residents(residents: Residents[Any]) -> None:
    """Fails unless the extents of a tier say what its blocks do."""
    blocks: list[Resident] = list(residents.blocks.values())
    sizes = {block.slot_bytes for block in blocks if idle(block)}
    for size in {block.slot_bytes for block in blocks}:
        assert residents.has_idle(size) == (size in sizes)
        assert residents.has_idle(size, others=True) == bool(sizes - {size})
    assert residents.pinned_bytes == sum(b.slot_bytes for b in blocks if b.pinned)
    extents = residents._extents.values()
    assert sum(len(extent.blocks) for extent in extents) == len(blocks)
    for extent in extents:
        members = [residents.blocks[key] for key in extent.blocks]
        assert all(block.extent is extent for block in members)
        assert extent.fixed == sum(not idle(block) for block in members)
        assert extent.pinned == sum(block.pinned for block in members)
    assert all(not idle(residents.blocks[key]) for key in residents._held)


def count_catalog(catalog: Catalog) -> None:
    """Fails unless slabs, bytes and orders say what the blocks of a disk tier do."""
    state, address = catalog._state.cells, catalog._address.cells
    here = [number for number in range(catalog._table.size) if state[number]]
    assert len(here) == len(catalog)
    assert len({address[number] for number in here}) == len(here)
    pinned = {number for number in here if state[number] & 2}
    read = {number for number in here if address[number] in catalog._reading}
    assert catalog.pinned_bytes == sum(map(catalog._slot_bytes, pinned))
    assert catalog.used_bytes == sum(map(catalog._slot_bytes, here))
    slabs = {slab_of(address[number]) for number in here}
    uses = {
        slab: SlabUse(
            sum(slab_of(address[number]) == slab for number in here),
            sum(slab_of(address[number]) == slab for number in pinned | read),
            sum(slab_of(address[number]) == slab for number in pinned),
        )
        for slab in slabs
    }
    assert catalog._slabs == uses
    assert catalog._held <= read
    policy = catalog._policy
    ranked = set(policy.victims_n(1 << 20, lambda number: True, catalog.now()))
    ranked |= set(catalog._tails.oldest_n())
    assert ranked <= set(here) - pinned
    staying = set(catalog._held)
    for number in policy._kept if isinstance(policy, HazardPolicy) else ():  # by hints
        while number >= 0 and number not in staying:
            staying.add(number)
            number = catalog._parent.cells[number] - 1  # goes after it
    assert set(here) - pinned - ranked <= staying


def count_names(catalog: Catalog) -> None:
    """Fails unless each name of a disk tier is kept as often as there are who know it. For the
    policies ``lru``, ``fifo`` and ``hazard``."""
    table, state = catalog._table, catalog._state.cells
    kept = Counter(catalog.departures._numbers)
    for number in range(table.size):
        if state[number]:
            kept[number] += 1
            if above := catalog._parent.cells[number]:
                kept[above - 1] += 1
    accounts = catalog.accounts._accounts.values()
    orders = [order for account in accounts for order in account.orders]
    for policy in (catalog._policy, catalog._tails, *orders):
        kept.update(_kept_by(policy, table.size))
    refs = table._refs.cells
    assert {n: refs[n] for n in range(table.size) if refs[n] > 0} == kept
    assert len(table) == len(kept)


def _kept_by(policy: EvictionPolicy, size: int) -> Iterator[int]:
    """The numbers that a policy knows, and the parents that it remembers of them."""
    if isinstance(policy, QueuePolicy):
        parents = policy._links.parent.cells
        for number in (*policy.oldest_n(), *policy._held):
            yield number
            if parents[number]:
                yield parents[number] - 1
        return
    assert isinstance(policy, HazardPolicy)
    for number in range(size):
        if policy._state.cells[number] & 3:  # resident or remembered
            yield number
            if above := policy._parent.cells[number]:
                yield above - 1
