"""The resident blocks of a tier: users, eviction order, pins, and the share of each tenant."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvrecall.block import NAMESPACE_BYTES, SHARED, BlockKey, Tenant, TierName, is_tail
from kvrecall.config import Amount, PoolTerms, TenantTerms
from kvrecall.pool.changes import Cause, Watchers
from kvrecall.pool.departures import Departures
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.pool.eviction.base import PART
from kvrecall.pool.eviction.queues import Links, LruPolicy
from kvrecall.pool.hints import Advice
from kvrecall.pool.holds import HOLD_S
from kvrecall.pool.names import DictNames, Names
from kvrecall.pool.slots import slot_bytes_of

_LOOKED_UP = 256  # blocks of a request at once
HELD_AT_ONCE = 4096  # about 4 ms
HELD_FROM = 64  # busy blocks passed in one search: more than one step of an engine commits


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block in one tier when it was listed. ``used``: second of its last use."""

    key: BlockKey
    tier: TierName
    tenant: Tenant
    parent: BlockKey | None
    depth: int
    slot_bytes: int
    used: float
    pinned: bool

    @property
    def hangs(self) -> bool:
        """Whether it hangs on a block of another KV group, as windows and states do."""
        return hangs(self.key, self.parent)


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant's share of a tier. ``limit_bytes`` is None without a limit; ``refused`` and
    ``evicted`` count blocks since the tenant last came to the tier, because of its limit."""

    tenant: Tenant
    used_bytes: int
    limit_bytes: int | None
    refused: int
    evicted: int


class Resident:
    """A block in a tier. Only its ``Residents`` changes it."""

    __slots__ = (
        "depth",
        "extent",
        "io_refs",
        "key",
        "leases",
        "nbytes",
        "parent",
        "pinned",
        "slot_bytes",
        "tenant",
        "used",
    )

    def __init__(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        nbytes: int,
        tenant: Tenant = SHARED,
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes_of(nbytes)
        self.tenant = tenant
        self.extent: Extent | None = None  # None: not visible in the tier
        self.leases = 0  # recalls that use the slot
        self.io_refs = 0  # reads or writes of the slot under way
        self.pinned = False  # an operator asked to keep it
        self.used = 0.0  # second of the last use

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return not (self.leases or self.io_refs or self.pinned)

    def info(self, tier: TierName) -> BlockInfo:
        return BlockInfo(
            self.key,
            tier,
            self.tenant,
            self.parent,
            self.depth,
            self.slot_bytes,
            self.used,
            self.pinned,
        )


R = TypeVar("R", bound=Resident)


def hangs(key: BlockKey, parent: BlockKey | None) -> bool:
    """Whether a block belongs to another KV group than the chain that its parent is in."""
    return parent is not None and not key.startswith(parent[:NAMESPACE_BYTES])


class Extent:
    """The blocks in one run of slots of one size, which the tier can only release as a whole: an
    extent of the arena, or a slab of the disk."""

    __slots__ = ("base", "blocks", "fixed", "pinned", "slot_bytes")

    def __init__(self, base: int, slot_bytes: int) -> None:
        self.base = base
        self.slot_bytes = slot_bytes
        self.blocks: dict[BlockKey, Resident] = {}
        self.fixed = 0  # blocks that cannot be evicted now: leased, with I/O under way, or pinned
        self.pinned = 0


class EvictionOrders:
    """The orders in which a tier evicts its blocks: the policy's, that of tails, and if tenants
    are limited to shares of the tier, one for each tenant. Not thread-safe; never waits.

    The policy does not know pinned blocks, and holds other busy blocks once it has passed them, so
    that searches do not pass them again and again.

    Tails of blocks are not the policy's: they go before all others, the least recently used first,
    and are accepted only while there is room, so that whole blocks are kept as without them.

    Each tenant's blocks are then also kept in their own order (least recently used, suffixes before
    prefixes), so that a tenant at its limit evicts its own coldest block without a search among
    those of all others.
    """

    def __init__(
        self,
        tier: TierName,
        policy: str,
        capacity_blocks: int,
        capacity_bytes: Callable[[], int],
        clock: Callable[[], float],
        terms: PoolTerms,
    ) -> None:
        """Shares of tenants and of pinned blocks are fractions of ``capacity_bytes()``; ``clock``
        never goes back."""
        self.pins: set[BlockKey] = set()  # keys an operator pinned, of blocks here or not
        self.pinned_bytes = 0
        self.evictions = 0
        self.watchers: Watchers = ()
        self._tier = tier
        self._policy_name = policy
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._terms = terms
        amounts = [self._amount(rules) for rules in terms.tenants.all]
        self.accounts = Accounts(any(amount is not None for amount in amounts), self.limit_of)
        self._rank(max(1, capacity_blocks))

    def _rank(self, capacity_blocks: int) -> None:
        """Begins new orders, without a block."""
        self._capacity_blocks = capacity_blocks
        self._names = self._new_names()
        self.departures = Departures(self._names, self.now)
        links = Links(self._names)
        self._policy: EvictionPolicy
        self._policy = make_policy(self._policy_name, capacity_blocks, self._names, links)
        self._tails = LruPolicy(self._names, links)
        self.accounts.rank(self._names)

    def _new_names(self) -> Names:
        return DictNames()

    def now(self) -> float:
        """Seconds that only pass."""
        return self._clock()

    @property
    def is_empty(self) -> bool:
        """Whether there is no visible block."""
        raise NotImplementedError

    def resize_policy(self, capacity_blocks: int) -> None:
        """Sizes the policy for a tier of that many blocks, if the tier is empty."""
        if self.is_empty and max(1, capacity_blocks) != self._capacity_blocks:
            self._rank(max(1, capacity_blocks))

    @property
    def pin_limit(self) -> int:
        """Limit of bytes of pinned blocks."""
        return int(self._terms.pin_limit * self._capacity_bytes())

    def admits(self, key: BlockKey, parent: BlockKey | None, depth: int) -> bool:
        """Whether the policy admits the block at the price of another, which it does not know for a
        tail. Called when full."""
        if is_tail(key):
            return False
        if next(self._tails.oldest(), None) is not None:
            return True
        return self._policy.admit(key, parent, depth, self.now(), hangs(key, parent))

    def use(
        self,
        lock: AbstractContextManager[Any],
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        """A request used ``chain`` (prefix first) and ``hanging`` blocks beside it, and leaves
        ``ending`` ones at its end.

        Takes the lock several times, since look-ups would wait for all the milliseconds that many
        blocks take. What happens between two holds may concern the same blocks: one that left is
        not used from there on, and another request's use may come in between."""
        self._tend(lock)
        names: Names | None = None
        numbers: list[int] = []  # of its blocks, as they are looked up
        kept = 0  # of these, so that they are no other blocks' while others have the lock
        parts = self._use_in_parts(numbers, chain, hanging, ending, advice)
        is_due = True
        while is_due:
            with lock:
                until = time.perf_counter() + HOLD_S
                if names is None:
                    names = self._names
                elif names is not self._names:  # the tier was empty, and is ranked anew
                    break
                is_due = any(time.perf_counter() >= until for _ in parts)
                if is_due:
                    names.keep_all(numbers[kept:])
                    kept = len(numbers)
                else:
                    names.sweep(numbers[kept:])
                    if kept:
                        names.drop_all(numbers[:kept])
            if is_due:
                time.sleep(0)  # who waits for the lock, or the interpreter, goes first
        self._tend(lock)

    def _use_in_parts(
        self,
        numbers: list[int],
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey],
        ending: Sequence[BlockKey],
        advice: Advice | None,
    ) -> Iterator[None]:
        """Looks the blocks up, then records their use in the policy, of themselves, and in the
        orders of their tenant. Adds the numbers that it needs to the end to ``numbers``."""
        now, names, learns = self.now(), self._names, self._policy.learns
        found: list[list[int]] = []
        for keys, has_all in ((chain, learns), (hanging, False), (ending, learns)):
            found.append([])
            for start in range(0, len(keys), _LOOKED_UP):
                asked = keys[start : start + _LOOKED_UP]
                some = names.meet_all(asked) if has_all else names.numbers(asked)
                found[-1] += some
                numbers += some if has_all else [number for number in some if number >= 0]
                yield
        used, beside, last = found
        yield from self._policy.access_in_parts(used, now, beside, last, advice)
        yield from self._tails.access_in_parts((), now, beside)
        tenant: Tenant | None = None
        for keys, its in ((chain, used), (hanging, beside)):
            for start in range(0, len(keys), PART):
                part = slice(start, start + PART)
                tenant = self._note_uses(keys[part], its[part], now) or tenant
                yield
        for order in () if tenant is None else self.accounts.orders(tenant):
            yield from order.access_in_parts(used, now, beside)

    def _note_uses(
        self, keys: Sequence[BlockKey], numbers: Sequence[int], now: float
    ) -> Tenant | None:
        """Records the last use of those that are here. The tenant of one of them; None: none
        is."""
        raise NotImplementedError

    def _tend(self, lock: AbstractContextManager[Any]) -> None:
        """``EvictionPolicy.tend`` until nothing is due, each time under a hold of the lock of its
        own: each takes milliseconds, in which look-ups would wait."""
        is_due = True
        while is_due:
            with lock:
                is_due = self._policy.tend(self.now())
            if is_due:
                time.sleep(0)

    def chance(self, key: BlockKey) -> float | None:
        """The policy's probability that the block is used again; None: no estimate."""
        return self._policy.chance(key, self.now())

    def limit_of(self, tenant: Tenant) -> int | None:
        """Bytes the tenant may hold; None without a limit."""
        amount = self._amount(self._terms.tenants.of(tenant))
        return None if amount is None else amount.of(self._capacity_bytes())

    def _amount(self, terms: TenantTerms) -> Amount | None:
        return terms.host if self._tier is TierName.HOST else terms.disk


class Residents(EvictionOrders, Generic[R]):
    """The visible blocks of one tier. Not thread-safe; never waits.

    A block is *idle* if it is neither leased nor pinned and has no I/O in flight; only idle blocks
    are evicted.
    """

    def __init__(
        self,
        tier: TierName,
        policy: str,
        capacity_blocks: int,
        capacity_bytes: Callable[[], int],
        clock: Callable[[], float],
        terms: PoolTerms,
    ) -> None:
        super().__init__(tier, policy, capacity_blocks, capacity_bytes, clock, terms)
        self.blocks: dict[BlockKey, R] = {}
        self.leases = 0
        self._extents: dict[int, Extent] = {}
        self._held: set[BlockKey] = set()  # those the policy holds

    @property
    def is_empty(self) -> bool:
        return not self.blocks

    # -- coming and going ------------------------------------------------------------------

    def insert(self, block: R, base: int, used: float, pinned: bool) -> None:
        """Makes a block visible whose slot is in the extent at ``base``. ``used``: time of its last
        use, at most ``now()``."""
        self.blocks[block.key] = block
        for watcher in self.watchers:
            watcher.stored(self._tier, block.key, block.parent)
        block.used = used
        self._place(block, base)
        if pinned:
            self._set_pinned(block, True)
        else:
            self._make_evictable(block, used)

    def remove(self, key: BlockKey, cause: Cause) -> R:
        """Makes a block invisible; the caller frees its slot, after I/O in flight."""
        block = self.blocks.pop(key)
        for watcher in self.watchers:
            watcher.removed(self._tier, key, cause)
        self.departures.note(key, cause)
        if block.pinned:
            self._set_pinned(block, False)
        else:
            self._make_fixed(block)
        self._displace(block)
        return block

    def replace(self, old: R, new: R, base: int) -> None:
        """``new`` is the same block in a slot of another extent. I/O of ``old`` may continue."""
        if not (old.is_idle or old.pinned):
            self._release_held(old)
        self._displace(old)
        self.blocks[new.key] = new
        self._place(new, base)

    def _place(self, block: R, base: int) -> None:
        """Adds the block to the extent at ``base``."""
        extent = self._extents.get(base)
        if extent is None:
            extent = self._extents[base] = Extent(base, block.slot_bytes)
        extent.blocks[block.key] = block
        extent.fixed += not block.is_idle
        extent.pinned += block.pinned
        block.extent = extent

    def _displace(self, block: R) -> None:
        """Removes the block from its extent."""
        extent = block.extent
        assert extent is not None
        del extent.blocks[block.key]
        extent.fixed -= not block.is_idle
        extent.pinned -= block.pinned
        if not extent.blocks:
            del self._extents[extent.base]
        block.extent = None

    def _make_fixed(self, block: R) -> None:
        """Removes the block from the orders, which contain evictable blocks."""
        for order in self._orders(block):
            order.remove(block.key)
        self._held.discard(block.key)

    def _make_evictable(self, block: R, used: float) -> None:
        hanging = hangs(block.key, block.parent)
        for order in self._orders(block):
            order.insert(block.key, block.parent, block.depth, used, hanging)

    def _orders(self, block: R) -> tuple[EvictionPolicy, ...]:
        """The orders that contain a block."""
        order, place = (self._tails, 0) if is_tail(block.key) else (self._policy, 1)
        if not self.accounts.is_bounded:
            return (order,)
        return (order, *self.accounts.orders(block.tenant)[place : place + 1])

    def _note_uses(
        self, keys: Sequence[BlockKey], numbers: Sequence[int], now: float
    ) -> Tenant | None:
        get, last = self.blocks.get, None
        for key in keys:
            block = get(key)
            if block is not None:
                last = block
                block.used = max(now, block.used)
        return None if last is None else last.tenant

    # -- in use ----------------------------------------------------------------------------

    def lease(self, blocks: Sequence[R]) -> None:
        """Visible blocks are in use."""
        self.leases += len(blocks)
        for block in blocks:
            before = block.leases
            block.leases = before + 1
            if not (before or block.io_refs or block.pinned):
                block.extent.fixed += 1  # type: ignore[union-attr]

    def unlease(self, blocks: Sequence[R]) -> None:
        """Releases leases."""
        self.leases -= len(blocks)
        held = self._held
        for block in blocks:
            left = block.leases - 1
            block.leases = left
            if not (left or block.io_refs or block.pinned):
                block.extent.fixed -= 1  # type: ignore[union-attr]
                if held and block.key in held:
                    self._release_held(block)

    def begin_io(self, block: R) -> None:
        """The slot is being read or written; it is not reused before ``end_io``."""
        if block.extent is not None and block.is_idle:
            block.extent.fixed += 1
        block.io_refs += 1

    def end_io(self, block: R) -> None:
        block.io_refs -= 1
        if block.extent is not None and block.is_idle:
            block.extent.fixed -= 1
            if block.key in self._held:
                self._release_held(block)

    def has_idle(self, slot_bytes: int, others: bool = False) -> bool:
        """Whether there is an idle block of that slot size, or of any other. Checks the extents,
        not the blocks."""
        return any(
            extent.fixed < len(extent.blocks) and (extent.slot_bytes == slot_bytes) is not others
            for extent in self._extents.values()
        )

    def _hold(self, blocks: Sequence[R]) -> None:
        """The orders skip these blocks until they are idle: only the first of them, so that no
        search takes much longer than without. A held block comes back as the oldest, so a few
        blocks in use, which may be the youngest, keep their places."""
        if len(blocks) < HELD_FROM:
            return
        held = self._held
        for block in blocks[:HELD_AT_ONCE]:
            held.add(block.key)
            for order in self._orders(block):
                order.hold(block.key)

    def _release_held(self, block: R) -> None:
        self._held.discard(block.key)
        for order in self._orders(block):
            order.release(block.key)

    # -- pinned by an operator -------------------------------------------------------------

    def may_pin(self, block: R) -> bool:
        """Whether pinning the block stays within ``pin_limit``."""
        return self.pinned_bytes + block.slot_bytes <= self.pin_limit

    def pin(self, keys: Iterable[BlockKey]) -> list[R]:
        """Pins blocks of these keys, present or future, as far as ``pin_limit`` allows. Returns
        those that are newly pinned."""
        changed: list[R] = []
        for key in keys:
            self.pins.add(key)
            block = self.blocks.get(key)
            if block is not None and not block.pinned and self.may_pin(block):
                self._make_fixed(block)
                self._set_pinned(block, True)
                changed.append(block)
        return changed

    def unpin(self, keys: Iterable[BlockKey]) -> list[R]:
        """Undoes ``pin``. Returns those blocks that were pinned."""
        changed: list[R] = []
        for key in keys:
            self.pins.discard(key)
            block = self.blocks.get(key)
            if block is not None and block.pinned:
                self._set_pinned(block, False)
                self._make_evictable(block, self.now())
                changed.append(block)
        return changed

    def _set_pinned(self, block: R, pinned: bool) -> None:
        assert block.extent is not None
        change = 1 if pinned else -1
        if not (block.leases or block.io_refs):
            block.extent.fixed += change
        block.pinned = pinned
        block.extent.pinned += change
        self.pinned_bytes += change * block.slot_bytes

    # -- which go --------------------------------------------------------------------------

    def victims(
        self,
        count: int,
        slot_bytes: int | None = None,
        wanted: Callable[[R], bool] | None = None,
    ) -> list[R]:
        """Up to ``count`` idle blocks (of a slot size, that are ``wanted``), the least valuable
        first. Removes none."""
        blocks = self.blocks
        busy: list[R] = []

        def evictable(key: BlockKey) -> bool:
            block = blocks[key]
            if block.leases or block.io_refs:
                busy.append(block)
                return False
            if slot_bytes is not None and block.slot_bytes != slot_bytes:
                return False
            return wanted is None or wanted(block)

        keys = self._tails.victims(count, evictable, self.now())
        if len(keys) < count:
            keys += self._policy.victims(count - len(keys), evictable, self.now())
        self._hold(busy)
        return [blocks[key] for key in keys]

    def victims_of(
        self, tenant: Tenant, nbytes: int, wanted: Callable[[R], bool] | None = None
    ) -> list[R]:
        """A limited tenant's idle blocks, coldest first, up to ``nbytes`` bytes."""
        found: list[R] = []
        busy: list[R] = []
        for key in itertools.chain.from_iterable(
            order.oldest() for order in self.accounts.orders(tenant)
        ):
            if nbytes <= 0:
                break
            block = self.blocks[key]
            if block.leases or block.io_refs:
                busy.append(block)
            elif wanted is None or wanted(block):
                found.append(block)
                nbytes -= block.slot_bytes
        self._hold(busy)
        return found


@dataclass(slots=True)
class _Account:
    orders: tuple[LruPolicy, ...]
    used_bytes: int = 0
    refused: int = 0
    evicted: int = 0


class Accounts:
    """The bytes that each tenant holds in a tier, and if tenants are ``bounded``, its eviction
    order. Not thread-safe; never waits."""

    def __init__(self, bounded: bool, limit_of: Callable[[Tenant], int | None]) -> None:
        self.is_bounded = bounded
        self._limit_of = limit_of
        self._accounts: dict[Tenant, _Account] = {}
        self._links: Links | None = None
        self.refused = 0
        self.evicted = 0

    def rank(self, names: Names) -> None:
        """Begins new orders, without a block."""
        self._links = Links(names) if self.is_bounded else None
        for account in self._accounts.values():
            account.orders = self._new_orders()

    def _new_orders(self) -> tuple[LruPolicy, ...]:
        links = self._links
        return (LruPolicy(links.names, links), LruPolicy(links.names, links)) if links else ()

    def charge(self, tenant: Tenant, nbytes: int) -> None:
        """Charges the tenant for that many bytes."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._new_orders())
        account.used_bytes += nbytes

    def refund(self, tenant: Tenant, nbytes: int) -> int:
        """Refunds the tenant; returns its remaining bytes. Without any it is forgotten."""
        account = self._accounts[tenant]
        account.used_bytes -= nbytes
        if not account.used_bytes:
            del self._accounts[tenant]
        return account.used_bytes

    def excess(self, tenant: Tenant, nbytes: int) -> int:
        """Bytes by which ``nbytes`` more would exceed the tenant's limit; 0 if they would not."""
        limit = self._limit_of(tenant) if self.is_bounded else None
        if limit is None:
            return 0
        account = self._accounts.get(tenant)
        used = 0 if account is None else account.used_bytes
        return max(0, used + nbytes - limit)

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Counts blocks refused because of the limit."""
        self.refused += blocks
        if tenant in self._accounts:
            self._accounts[tenant].refused += blocks

    def evict(self, tenant: Tenant, blocks: int) -> None:
        """Counts blocks evicted because of the limit."""
        self.evicted += blocks
        if tenant in self._accounts:
            self._accounts[tenant].evicted += blocks

    def orders(self, tenant: Tenant) -> tuple[LruPolicy, ...]:
        """The tenant's eviction orders, of tails and of other blocks; none if tenants are not
        limited, or this one holds no block."""
        if not self.is_bounded or tenant not in self._accounts:
            return ()
        return self._accounts[tenant].orders

    def uses(self) -> list[TenantUse]:
        """Tenants that hold blocks."""
        return [
            TenantUse(
                tenant,
                account.used_bytes,
                self._limit_of(tenant) if self.is_bounded else None,
                account.refused,
                account.evicted,
            )
            for tenant, account in self._accounts.items()
        ]
