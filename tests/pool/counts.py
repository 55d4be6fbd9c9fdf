"""What a tier counts as it goes, counted by hand. Under the tier's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.slabs import slab_of
from kvrecall.pool.entries import HERE, PINNED, EntryTable, Extent
from kvrecall.pool.eviction import EvictionPolicy
from kvrecall.pool.eviction.queues import LruPolicy
from kvrecall.pool.eviction.warmup import WarmUp
from kvrecall.pool.host import Block, HostStore


def count_host(host: HostStore) -> None:
    """Fails unless the extents of the host say what its blocks do."""
    blocks: list[Block] = list(host.blocks.values())
    state = host._state.cells

    def idle(block: Block) -> bool:
        return not (block.leases or block.io_refs or state[block.number] & PINNED)

    sizes = {block.slot_bytes for block in blocks if idle(block)}
    for size in {block.slot_bytes for block in blocks}:
        assert host.has_idle(size) == (size in sizes)
        assert host.has_idle(size, others=True) == bool(sizes - {size})
    _count_extents(host, [block.number for block in blocks])
    assert all(not idle(host._numbered[number]) for number in host._held)


def _count_extents(table: EntryTable, here: list[int]) -> None:
    state = table._state.cells
    assert table._blocks == len(here)
    pinned = [number for number in here if state[number] & PINNED]
    assert table.pinned_bytes == sum(map(table._slot_bytes, pinned))
    counted: dict[int, Extent] = {}
    for number in here:
        extent = counted.setdefault(table._place_of(number), Extent())
        is_pinned = bool(state[number] & PINNED)
        extent.blocks += 1
        extent.fixed += is_pinned or table._is_busy(number)
        extent.pinned += is_pinned
        extent.slot_bytes = table._slot_bytes(number)
    assert table._extents == counted


def count_catalog(catalog: Catalog) -> None:
    """Fails unless slabs and bytes say what the blocks of a disk tier do. Under its lock."""
    state, address = catalog._state.cells, catalog._address.cells
    here = [number for number in range(catalog._table.size) if state[number] & HERE]
    assert len({address[number] for number in here}) == len(here)
    assert catalog.used_bytes == sum(map(catalog._slot_bytes, here))
    assert {catalog._place_of(n) for n in here} == {slab_of(address[n]) for n in here}
    _count_extents(catalog, here)


def count_orders(catalog: Catalog) -> None:
    """Fails unless the orders of a disk tier have all its blocks, and each name is kept as often as
    there are who know it. For its owner, after ``settle``."""
    table, state, policy = catalog._table, catalog._state.cells, catalog._policy
    here = {number for number in range(table.size) if state[number]}
    assert all(state[number] & HERE for number in here)
    pinned = {number for number in here if state[number] & PINNED}
    read = {number for number in here if catalog._is_busy(number)}
    assert catalog._held <= read
    ranked = set(policy.victims(1 << 20, lambda number: True, catalog.now()))
    ranked |= set(catalog._tails)
    assert ranked <= here - pinned
    staying = set(catalog._held)
    for number in policy._pins._pinned if isinstance(policy, WarmUp) else ():
        while number >= 0 and number not in staying:
            staying.add(number)
            number = catalog._parent.cells[number] - 1  # goes after it
    assert here - pinned - ranked <= staying

    kept = Counter(catalog.departures._numbers)
    for number in here:
        kept[number] += 1
        if above := catalog._parent.cells[number]:
            kept[above - 1] += 1
    accounts = catalog.accounts._accounts.values()
    assert sum(account.blocks for account in accounts) == len(here)
    for order in (policy, catalog._tails, *(o for account in accounts for o in account.orders)):
        kept.update(_kept_by(order, table.size))
    refs = table._refs.cells
    assert {n: refs[n] for n in range(table.size) if refs[n] > 0} == kept
    assert len(table) == len(kept)


def _kept_by(policy: EvictionPolicy, size: int) -> Iterator[int]:
    """The numbers that a policy knows, and the parents that it remembers of them."""
    if isinstance(policy, LruPolicy):
        parents = policy._links.parent.cells
        for number in (*policy, *policy._queue.held):
            yield number
            if parents[number]:
                yield parents[number] - 1
    elif isinstance(policy, WarmUp):
        for number in range(size):
            if policy._ranked.is_known(number):
                yield number
                if above := policy._ranked._parent.cells[number]:
                    yield above - 1
    else:
        for queue in (policy._small, policy._main, policy._ghost):  # type: ignore[attr-defined]
            yield from (*queue, *queue.held)
