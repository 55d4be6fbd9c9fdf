"""What the arena holds: blocks by key, their leases, who goes when room is short."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kvrecall.block import SHARED, BlockKey, Tenant
from kvrecall.config import PoolTerms
from kvrecall.pool.accounts import Accounts
from kvrecall.pool.clock import SteadyClock
from kvrecall.pool.eviction import EvictionPolicy, make_policy
from kvrecall.pool.room import ArenaRoom
from kvrecall.pool.slots import slot_bytes_of

_LEEWAY = 16  # blocks passed over, at least, to find one that a lower tier has


class Block:
    """A slot of the arena and the block in it. Only pool and host store change it."""

    __slots__ = (
        "depth",
        "key",
        "leases",
        "nbytes",
        "offset",
        "parent",
        "pinned",
        "pins",
        "slot_bytes",
        "stored",
        "tenant",
        "tries",
        "used",
    )

    def __init__(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        offset: int,
        nbytes: int,
        tenant: Tenant = SHARED,
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.offset = offset
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes_of(nbytes)
        self.tenant = tenant
        self.leases = 0  # recalls that copy from the slot
        self.pins = 0  # writes to a lower tier under way
        self.pinned = False  # not to be evicted, somebody said
        self.stored = False  # a lower tier has it too
        self.tries = 0  # failed attempts to store it there
        self.used = 0.0  # wall-clock second of the last use


class HostStore:
    """The committed blocks of an arena. Not thread-safe; never waits.

    A slot is owned by the caller from ``allocate`` until it is given back with ``free`` or
    becomes a visible block with ``publish``. Pinned blocks are not known to the eviction policy.
    """

    def __init__(
        self,
        room: ArenaRoom,
        policy: str,
        prefer_stored: bool,
        clock: Callable[[], float],
        terms: PoolTerms | None = None,
    ) -> None:
        self.room = room
        self.blocks: dict[BlockKey, Block] = {}
        self.pins: set[BlockKey] = set()  # to be kept, here or not
        self.pinned_bytes = 0
        self.evictions = 0
        self.leases = 0
        self.spare: Callable[[Sequence[Block]], Collection[BlockKey]] = _let_go
        """Called with blocks that are about to be evicted and not yet wherever they shall be;
        names those that must stay for now."""
        self.owed: Callable[[BlockKey], bool] = lambda key: False
        """Whether a block is to be stored somewhere else, too, before it goes."""
        self.withdrawn: Callable[[BlockKey], None] = lambda key: None
        """Called with every block that is no longer visible."""
        self._terms = terms or PoolTerms()
        self._rules = self._terms.tenants
        bounded = any(terms.host is not None for terms in self._rules.all)
        self.accounts = Accounts(bounded, self._limit_of)
        self._policy_name = policy
        self._policy: EvictionPolicy = make_policy(policy, max(1, room.limit_bytes >> 20))
        self._prefer_stored = prefer_stored
        self._clock = SteadyClock(clock)
        self._trimming = False

    def resize(self, capacity_blocks: int) -> None:
        """Fits the policy to so many blocks, if there are none yet."""
        if not self.blocks:
            self._policy = make_policy(self._policy_name, max(1, capacity_blocks))

    def allocate(
        self, nbytes: int, count: int, picky: Sequence[Block] = (), tenant: Tenant = SHARED
    ) -> list[int]:
        """Offsets of slots for ``count`` blocks of a tenant, ascending; fewer if room cannot be
        made, or not within the tenant's limit.

        If ``picky`` names these blocks, room is made only for as many as the policy wants.
        """
        slot_bytes = slot_bytes_of(nbytes)
        count = self._within_limit(tenant, slot_bytes, count)
        offsets = self.room.take(slot_bytes, count)
        if picky:
            wanted = itertools.takewhile(self._admits, picky[len(offsets) : count])
            count = len(offsets) + sum(1 for _ in wanted)
        while len(offsets) < count:
            if not self._make_room(slot_bytes, count - len(offsets)):
                break
            more = self.room.take(slot_bytes, count - len(offsets))
            if not more:
                break
            offsets += more
        offsets.sort()
        if offsets:
            self.accounts.charge(tenant, len(offsets) * slot_bytes)
        return offsets

    def free(self, block: Block) -> None:
        """Gives the slot of a block back that is not (or no longer) visible."""
        self.room.give(block.slot_bytes, block.offset)
        self.accounts.refund(block.tenant, block.slot_bytes)

    def publish(self, block: Block) -> None:
        """Makes a filled block visible."""
        self.blocks[block.key] = block
        block.used = self._clock()
        if block.key in self.pins and self.pinned_bytes + block.slot_bytes <= self.pin_limit:
            self._fix(block)
        else:
            self._loosen(block)

    def withdraw(self, key: BlockKey) -> Block:
        """Makes a block invisible; its slot is the caller's to free."""
        block = self.blocks.pop(key)
        self._policy.remove(key)
        self.accounts.leave(block.tenant, key)
        if block.pinned:
            block.pinned = False
            self.pinned_bytes -= block.slot_bytes
        self.withdrawn(key)
        return block

    def access(self, chain: Sequence[BlockKey]) -> None:
        """A request used ``chain`` (prefix first)."""
        now, get = self._clock(), self.blocks.get
        self._policy.access(chain, now)
        block = last = None
        for key in chain:
            block = get(key)
            if block is not None:
                block.used = now
                last = block
        if last is not None and self.accounts.is_bounded:
            self.accounts.access(last.tenant, chain)

    def lease(self, block: Block) -> None:
        block.leases += 1
        self.leases += 1

    def unlease(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.leases -= 1
            self.leases -= 1

    def chance(self, key: BlockKey) -> float | None:
        """How likely the policy thinks it that the block is used again; None: it cannot tell."""
        return self._policy.chance(key, self._clock())

    # -- pins ------------------------------------------------------------------------------

    @property
    def pin_limit(self) -> int:
        """Bytes that pinned blocks may take."""
        return int(self._terms.pin_limit * self.room.limit_bytes)

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Blocks of these keys, now or later, are not evicted, as far as ``pin_limit`` allows."""
        for key in keys:
            self.pins.add(key)
            block = self.blocks.get(key)
            if (
                block is not None
                and not block.pinned
                and self.pinned_bytes + block.slot_bytes <= self.pin_limit
            ):
                self._policy.remove(key)
                self.accounts.leave(block.tenant, key)
                self._fix(block)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Takes ``pin`` back."""
        for key in keys:
            self.pins.discard(key)
            block = self.blocks.get(key)
            if block is not None and block.pinned:
                block.pinned = False
                self.pinned_bytes -= block.slot_bytes
                self._loosen(block)

    def _fix(self, block: Block) -> None:
        block.pinned = True
        self.pinned_bytes += block.slot_bytes

    def _loosen(self, block: Block) -> None:
        """From now on the block can be evicted."""
        self._policy.insert(block.key, block.parent, block.depth, self._clock())
        self.accounts.join(block.tenant, block.key, block.parent)

    # -- limits ----------------------------------------------------------------------------

    def trim(self, most: int) -> bool:
        """Evicts up to ``most`` blocks if the host is above its high mark (or the limit was
        lowered), until it is at the low one. False if there is no more to do, or nothing can be
        done now."""
        limit, marks, used = self.room.limit_bytes, self._terms.host_marks, self.room.used_bytes
        if used > marks.high * limit:
            self._trimming = True
        surplus = used - marks.low * limit
        if not self._trimming or surplus <= 0:
            self._trimming = False
            return False
        going: list[BlockKey] = []
        for key in self._policy.victims(most, self._is_idle, self._clock()):
            if surplus <= 0:
                break
            going.append(key)
            surplus -= self.blocks[key].slot_bytes
        return self._give_up(going) > 0

    @property
    def least_limit(self) -> int:
        """Bytes of the smallest limit there is: the host's, or a tenant's."""
        limit = self.room.limit_bytes
        amounts = [terms.host for terms in self._rules.all if terms.host is not None]
        return min([limit, *(amount.of(limit) for amount in amounts)])

    def _limit_of(self, tenant: Tenant) -> int | None:
        amount = self._rules.of(tenant).host
        return None if amount is None else amount.of(self.room.limit_bytes)

    def _within_limit(self, tenant: Tenant, slot_bytes: int, count: int) -> int:
        """How many of ``count`` slots the tenant may have. Its own coldest blocks make room."""
        accounts = self.accounts
        excess = accounts.excess(tenant, count * slot_bytes)
        if not excess:
            return count
        for offer in (True, False):  # as in ``_evict_own``: last what is only owed elsewhere
            self._evict_of(tenant, excess, offer)
            excess = accounts.excess(tenant, count * slot_bytes)
            if not excess:
                return count
        fitting = max(0, count - -(-excess // slot_bytes))
        accounts.refuse(tenant, count - fitting)
        return fitting

    def _evict_of(self, tenant: Tenant, surplus: int, offer: bool) -> None:
        """Evicts ``surplus`` bytes of a tenant's coldest blocks; without ``offer`` only those that
        are stored in the tier that counts, and at once."""
        going: list[BlockKey] = []
        for key in self.accounts.oldest(tenant):
            if surplus <= 0:
                break
            block = self.blocks[key]
            if self._is_idle(key) and (offer or block.stored):
                going.append(key)
                surplus -= block.slot_bytes
        self.accounts.evict(tenant, self._give_up(going, offer))

    # -- making room -----------------------------------------------------------------------

    def _make_room(self, slot_bytes: int, count: int) -> bool:
        """Evicts for ``count`` slots of that size. False if nothing could be evicted."""
        cold: list[BlockKey] = []
        if self.room.has_others(slot_bytes):
            cold = self._policy.victims(max(64, count), self._is_idle, self._clock())
            others = sum(self.blocks[key].slot_bytes != slot_bytes for key in cold)
            if others * 2 > len(cold) and self._take_over(slot_bytes, cold):
                return True
        if self._evict_own(slot_bytes, count):
            return True
        return self._take_over(slot_bytes, cold)

    def _evict_own(self, slot_bytes: int, count: int) -> bool:
        """Evicts blocks of that size class, among the coldest those first that a lower tier
        has."""
        blocks = self.blocks

        def evictable(key: BlockKey) -> bool:
            block = blocks[key]
            return not (block.leases or block.pins) and block.slot_bytes == slot_bytes

        looked_at = count + max(count, _LEEWAY) if self._prefer_stored else count
        victims = self._policy.victims(looked_at, evictable, self._clock())
        if self._prefer_stored:
            victims.sort(key=lambda key: not self._is_safe(key))
        if self._give_up(victims[:count]):
            return True
        if not victims:
            return False
        # Whatever is cold is on its way down now; what is there already goes in its stead, and
        # last what is owed elsewhere.
        safe = self._policy.victims(
            count, lambda key: self._is_safe(key) and evictable(key), self._clock()
        )
        if self._give_up(safe):
            return True
        owed = self._policy.victims(
            count, lambda key: blocks[key].stored and evictable(key), self._clock()
        )
        return self._give_up(owed, offer=False) > 0

    def _take_over(self, slot_bytes: int, cold: Sequence[BlockKey]) -> bool:
        """Empties extents of other size classes so that a slot of this size fits."""
        held: dict[int, list[BlockKey]] = {}
        fixed: set[int] = set()
        places: Counter[int] = Counter()
        for block in self.blocks.values():
            if block.slot_bytes == slot_bytes:
                continue
            base = self.room.extent_of(block.slot_bytes, block.offset)
            held.setdefault(base, []).append(block.key)
            places[base] += 1
            if block.leases or block.pins or block.pinned:
                fixed.add(base)
        cost = {base: float(len(keys)) for base, keys in held.items() if base not in fixed}
        for base, used in self.room.used_slots(slot_bytes).items():
            if used != places[base]:  # slots that are being filled
                cost.pop(base, None)
        for rank, key in enumerate(cold):  # the coldest cost nothing
            block = self.blocks[key]
            base = self.room.extent_of(block.slot_bytes, block.offset)
            if base in cost:
                cost[base] -= 1.0 - rank / len(cold)
        window = self.room.window(slot_bytes, cost)
        if window is None:
            return False
        going = [key for base in window.extents for key in held[base]]
        if self._give_up(going) < len(going):
            return False  # some are stored first
        self.room.take_back(window)
        return True

    def _give_up(self, keys: Sequence[BlockKey], offer: bool = True) -> int:
        """Evicts idle blocks, but those that have to be stored before (without ``offer``: in the
        tier that counts only). Returns how many."""
        blocks = self.blocks
        unsafe = [
            blocks[key] for key in keys if not blocks[key].stored or (offer and self.owed(key))
        ]
        spared = self.spare(unsafe) if unsafe else ()
        going = [key for key in keys if key not in spared]
        for key in going:
            self.free(self.withdraw(key))
        self.evictions += len(going)
        return len(going)

    def _admits(self, block: Block) -> bool:
        """Whether the policy wants the block at the price of another."""
        return self._policy.admit(block.key, block.parent, block.depth, self._clock())

    def _is_safe(self, key: BlockKey) -> bool:
        """Whether nothing is left to do before the block goes."""
        return self.blocks[key].stored and not self.owed(key)

    def _is_idle(self, key: BlockKey) -> bool:
        block = self.blocks[key]
        return not (block.leases or block.pins)


def _let_go(blocks: Sequence[Block]) -> Collection[BlockKey]:
    """Nothing is stored before it is evicted."""
    return ()
