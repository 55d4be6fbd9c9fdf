"""The writer: stores blocks of the host in the lower tier, when the write policies say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvrecall.block import BlockKey
from kvrecall.pool.arena import Arena
from kvrecall.pool.host import Block, HostStore
from kvrecall.pool.tier import Checksum, Done, NullTier, Outcome, Put, PutVerdict, Tier
from kvrecall.pool.write_policy import STORE_TRIES, RemoteWriteBack, WritePolicy

_NEVER = 1 << 62
_STALLED_S = 1.0  # without the end of a write
_OFFERED_SHARE = 0.25


class Writer:
    """Queues puts of host blocks and processes their completion. Used under its pool's lock; never
    waits.

    A block may be dirty in two ways: not in the lower tier that counts (``policy`` knows when it is
    written), and not in a remote tier beyond it with write-back (``remote_policy``). For the remote
    tier a put is an *offer*: ``Put.shared``.
    """

    def __init__(
        self,
        host: HostStore,
        below: Tier,
        arena: Arena,
        policy: WritePolicy,
        remote_policy: RemoteWriteBack | None,
        monotonic: Callable[[], float],
    ) -> None:
        """``remote_policy``: None if every put is for all tiers."""
        self._host = host
        self._below = below
        self._arena = arena
        self._policy = policy
        self._remote_policy = remote_policy or WritePolicy()
        self._offers_all = remote_policy is None
        self._monotonic = monotonic
        self._writing: dict[BlockKey, tuple[Block, Checksum]] = {}
        self._offered: set[BlockKey] = set()  # of those, the ones that are offers
        self._offered_bytes = 0
        self._shed: dict[BlockKey, Block] = {}  # the tier's queue had no room for these
        self._shed_at = 0  # puts that were queued then
        self._wrote_at = float("-inf")  # when a write ended, or the first of those under way began
        self._full_at = _NEVER  # puts that were queued when the tier last had no room for more
        self.has_below = not isinstance(below, NullTier)

    @property
    def unwritten_bytes(self) -> int:
        return self._policy.unwritten_bytes

    def is_durable(self, key: BlockKey) -> bool:
        """Whether the block is in the lower tier that counts."""
        return self._below.contains(key) and self._below.tier_of(key) is self._below.name

    def is_clean(self, block: Block) -> bool:
        """Whether the block can be evicted without further writes."""
        return block.stored and block.key not in self._remote_policy

    def keep_checksum(self, block: Block, checksum: bytes | None) -> None:
        """Keeps the checksum of a block's bytes for as long as a tier is to get the block: if they
        change before that, the tier's copy is found damaged."""
        block.checksum = None if self.is_clean(block) else checksum

    # -- what happens to blocks ------------------------------------------------------------

    def committed(self, blocks: Sequence[Block]) -> None:
        if self.has_below:
            self._remote_policy.committed(blocks)
            self.store(self._policy.committed(blocks))

    def touched(self, chain: Sequence[BlockKey], hanging: Sequence[BlockKey] = ()) -> None:
        """A request asked for ``chain``, and for ``hanging`` blocks beside it."""
        wanted = self._policy.touched(chain, hanging)
        self._remote_policy.touched(chain, hanging)
        blocks = self._host.blocks
        self._store_missing([blocks[key] for key in wanted if key in blocks])

    def recalled(self, blocks: Sequence[Block]) -> None:
        self._store_missing(self._policy.recalled(blocks))

    def lost(self, blocks: Sequence[Block]) -> None:
        """Blocks are no longer in the lower tier: they are stored on next use."""
        for block in blocks:
            self._host.set_stored(block, False)
        self._policy.committed(blocks)

    def withdrawn(self, block: Block) -> None:
        self._shed.pop(block.key, None)
        self._policy.settled(block.key)
        self._remote_policy.settled(block.key)

    def leaving(self, blocks: Sequence[Block]) -> frozenset[BlockKey]:
        """Stores dirty blocks among ``blocks``, which are about to be evicted. Returns those that
        must stay until that is done. No block must stay because of a tier that accepts no more and
        has not finished a write for a while, or a remote tier that accepts no more: such lost
        blocks are counted as shed."""
        wanted = self._policy.leaving([block for block in blocks if not block.stored])
        offers = self._offerable(self._remote_policy.leaving(blocks))
        self.store(offers, offering=True)
        self.store(wanted)
        now = self._monotonic()
        stalled = bool(self._writing) and now - self._wrote_at > _STALLED_S
        staying = [b.key for b in wanted if b.io_refs or not (b.stored or stalled)]
        return frozenset(staying + [b.key for b in offers if b.io_refs])

    def _offerable(self, blocks: Sequence[Block]) -> list[Block]:
        """The first of ``blocks``, few enough that making room for new ones need not wait for a
        remote tier: together with those in flight, a share of the smallest limit."""
        left = int(_OFFERED_SHARE * self._host.least_limit) - self._offered_bytes
        sizes = itertools.accumulate(block.slot_bytes for block in blocks)
        return [block for block, size in zip(blocks, sizes, strict=True) if size <= left]

    # -- storing ---------------------------------------------------------------------------

    def store_due(self) -> None:
        """Stores the blocks that are due by the policies."""
        if not self.has_below:
            return
        blocks, host = self._host.blocks, self._host
        self.store(self._policy.due(blocks, host.slots.limit_bytes))
        offers = self._offerable(self._remote_policy.due(blocks, host.least_limit))
        self.store(offers, offering=True)
        if offers and not any(block.io_refs for block in offers):
            self._remote_policy.pause()

    def store_rest(self) -> bool:
        """Stores the blocks that were kept back, before the pool closes. False if none is left, or
        the lower tier accepts no more."""
        if not self.has_below:
            return False
        blocks = self._host.blocks
        self.store(self._remote_policy.rest(blocks), offering=True)
        self._store_missing(self._policy.rest(blocks))
        owed = self._policy.unwritten_bytes + self._remote_policy.unwritten_bytes
        return bool(self._writing) and owed > 0

    def store_until_durable(self, keys: Sequence[BlockKey]) -> list[BlockKey] | None:
        """The ``keys`` that are not durable yet, queued again if they were shed. None if one of
        them cannot become durable."""
        waiting: list[BlockKey] = []
        again: list[Block] = []
        for key in keys:
            if self.is_durable(key):
                continue
            waiting.append(key)
            if key in self._writing:
                continue
            block = self._host.blocks.get(key)
            if block is None or block.tries >= STORE_TRIES:
                return None
            again.append(block)
        queued = self._below.queued()[0]
        if again and (queued < self._full_at or not queued):
            self.store(again)
            refused = any(block.key not in self._writing and not block.stored for block in again)
            if refused and not queued:
                return None  # not for want of room in the queue
            self._full_at = self._below.queued()[0] if refused else _NEVER
        return waiting

    def _store_missing(self, blocks: Iterable[Block]) -> None:
        """Stores the unstored ones of ``blocks``, except those that failed too often."""
        self.store([b for b in blocks if not (b.stored or b.io_refs or b.tries >= STORE_TRIES)])

    def store(self, blocks: Sequence[Block], offering: bool = False) -> None:
        """Queues committed blocks, a chain prefix first, to be stored below. Skips keys of which an
        older block is still being stored. ``offering``: also in the remote tier, even with
        write-back. Blocks that do not fit in the tier's queue follow when there is space, unless
        they leave the host before."""
        blocks = [block for block in blocks if block.key not in self._writing]
        if not (self.has_below and blocks):
            return
        shared = offering or self._offers_all
        puts = [
            Put(
                b.key,
                b.parent,
                b.depth,
                self._arena.view(b.offset, b.slot_bytes),
                b.nbytes,
                b.tenant,
                shared,
                Checksum(b.checksum),
            )
            for b in blocks
        ]
        if not self._writing:
            self._wrote_at = self._monotonic()
        verdicts = self._below.submit_put(puts)
        if not offering and PutVerdict.SHED in verdicts:
            self._shed_at = self._below.queued()[0]
        for block, put, verdict in zip(blocks, puts, verdicts, strict=True):
            if verdict is not PutVerdict.SHED:
                self._shed.pop(block.key, None)
            elif not offering:
                self._shed[block.key] = block
            if verdict is PutVerdict.QUEUED:
                self._host.begin_io(block)
                self._writing[block.key] = block, put.checksum
                if offering:
                    self._offered.add(block.key)
                    self._offered_bytes += block.slot_bytes
            elif verdict is PutVerdict.PRESENT and self.is_durable(block.key):
                self._host.set_stored(block, True)
                self._policy.settled(block.key)

    def ended(self, done: Done) -> None:
        block, checksum = self._writing.pop(done.key)
        self._wrote_at = self._monotonic()
        self._host.end_io(block)
        if done.key in self._offered:
            self._offered.discard(done.key)
            self._offered_bytes -= block.slot_bytes
            self._remote_policy.settled(done.key)
        if done.outcome is Outcome.STORED:
            self._host.set_stored(block, True)
            self._policy.settled(block.key)
        else:
            block.tries += 1
        self.keep_checksum(block, checksum.known)
        if block.number < 0:  # withdrawn meanwhile
            self._host.free(block)
        room = self._shed_at - self._below.queued()[0] if self._shed else 0
        if room > 0:
            self.store(list(itertools.islice(self._shed.values(), room)))
