"""What the pool promises to an engine: values, and the interface that both its forms implement.

A *pool* holds blocks of bytes under keys. An engine uses it in two sequences of calls:

recall   ``find`` how long a prefix is present (``locate`` which single blocks are, for KV groups
         that need no whole prefix), ``acquire`` it (leases host blocks, starts promoting the
         others), ``poll`` until READY, copy from the arena, ``release``.
save     ``reserve`` arena slots for freshly computed blocks, copy into them, ``commit``.

No method waits for I/O except ``flush`` and ``close``. All methods may be called from any thread.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.pool.hints import Hint


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """How another process of the same user maps the arena: ``/proc/<pid>/fd/<fd>``.

    The arena is an anonymous memory file: it has no name in ``/dev/shm`` and is freed by the
    kernel with its last holder, however that process ends.

    A restarted service may get the same process number and file descriptor (in a container it
    usually does), so the handle also carries the memory file's ``inode`` and, for a service, the
    ``boot`` id of its run: equal handles mean the same memory.

    ``seat``: of the engine at a service, held by each process that maps the arena for it (0: none
    is needed). See ``Arena.attach``.
    """

    pid: int
    fd: int
    nbytes: int
    inode: int = 0
    boot: str = ""
    seat: int = 0


NO_ARENA = ArenaHandle(pid=0, fd=-1, nbytes=0)
"""No service was ever found: there are no offsets into this arena, and no process maps it."""


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of the requested keys that is in the pool, and the tier of each block.

    ``pending``: a lookup of the next block in a tier beyond this host is in flight; call again.
    """

    tiers: tuple[TierName, ...]
    pending: bool = False

    @property
    def blocks(self) -> int:
        return len(self.tiers)


@dataclass(frozen=True, slots=True)
class Located:
    """The tier of each of the requested keys, in their order; None: not present.

    ``pending``: a lookup of some of them in a tier beyond this host is in flight; call again.
    """

    tiers: tuple[TierName | None, ...]
    pending: bool = False

    @property
    def blocks(self) -> int:
        """How many are present."""
        return len(self.tiers) - self.tiers.count(None)


class RecallState(enum.Enum):
    """READY is final: no further block will arrive."""

    PENDING = "pending"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Recall:
    """State of an acquisition. READY: ``offsets[i]`` is the arena offset (bytes) of block i.

    May contain fewer blocks than requested (evicted, corrupt, too late, no space): always a
    prefix of them. ``tiers[i]`` is where block i was when it was acquired.
    """

    state: RecallState
    offsets: tuple[int, ...] = ()
    tiers: tuple[TierName, ...] = ()


class Presence(enum.StrEnum):
    """What the pool knows about a block that a request did not get."""

    HERE = "here"  # it has the block
    FILLING = "filling"  # a request is computing it, or its copy is under way
    GONE = "gone"  # it left a tier; ``Absence.cause`` is a ``Cause``
    REFUSED = "refused"  # it was not accepted; ``Absence.cause`` is a ``Refusal``
    ELSEWHERE = "elsewhere"  # it is in another namespace only, which differs in ``Absence.fields``
    AWAY = "away"  # the tier that has it, or may have it, does not answer
    BARRED = "barred"  # the pool refuses its namespace: no block of that size fits
    UNKNOWN = "unknown"  # nothing


class Absence(msgspec.Struct, frozen=True):
    """Why a block was not found, as the pool knows it. ``at``: wall-clock seconds. ``tier``: the
    one it left, was refused by, lies in or that does not answer; "service": the pool service."""

    presence: Presence
    tier: str = ""
    cause: str = ""
    at: float = 0.0
    fields: tuple[str, ...] = ()


class Verdict(enum.Enum):
    """Answer to a reservation."""

    RESERVED = "reserved"  # fill the slot, then commit or abandon
    PRESENT = "present"  # the pool has it, or another caller is filling it
    REFUSED = "refused"  # no space, or shedding load; compute on, nothing is owed


class Reservation(msgspec.Struct, frozen=True):
    """The answer for one block, and its slot if there is one."""

    verdict: Verdict
    offset: int = -1  # bytes into the arena; valid if RESERVED


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the pool was opened, and gauges. Bytes, blocks and seconds."""

    name: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    evictions: int = 0
    dropped: int = 0  # stores shed (queue full, no room)
    errors: int = 0  # I/O errors
    corrupt: int = 0  # checksum or length mismatches; such a block is a miss
    pinned_bytes: int = 0  # gauge
    over_quota: int = 0  # blocks refused for a tenant's limit
    quota_evictions: int = 0  # blocks evicted for their tenant's limit; among ``evictions``
    full: int = 0  # gauge; 1: the medium has no room, though the tier is below its limit
    given_bytes: int = 0  # to a tier that compresses, to be stored
    compressed_bytes: int = 0  # what became of ``given_bytes``


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters since the pool was opened, and gauges. ``histograms``: latencies by name, rows of
    ``(upper bound in seconds, number of samples up to that)``."""

    tiers: tuple[TierStats, ...]
    leases: int = 0
    reserved: int = 0  # slots being filled
    queued_writes: int = 0
    queued_reads: int = 0
    lookups: int = 0  # blocks looked up
    hits: int = 0  # blocks found, any tier
    refused: int = 0  # reservations refused
    hints: int = 0  # given by clients
    hints_believed: int = 0  # because enough of the tenant's came true before
    hints_true: int = 0  # by their outcome
    hints_false: int = 0
    unwritten_bytes: int = 0  # in the host and, by the write policy, not written yet
    pool_up: int = 1  # gauge; 0: the pool is a service's, and it is away
    histograms: dict[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)


def check_parents(
    keys: Sequence[BlockKey], parent: BlockKey | None, parents: Sequence[BlockKey | None] | None
) -> None:
    """Raises ValueError unless they name one parent for each key, or a chain's."""
    if parents is None:
        return
    if len(parents) != len(keys):
        raise ValueError(f"{len(parents)} parents of {len(keys)} blocks")
    if parent is not None:
        raise ValueError("either the parent of a chain or the parents of single blocks")


class PoolClient(Protocol):
    """The pool as an engine sees it: one embedded in its process, or the service of its node."""

    def arena_handle(self) -> ArenaHandle: ...

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """Declares a namespace and the size of its blocks (bytes, any positive number).

        Call before using keys of the namespace. Raises ConfigError if the arena cannot hold even
        one block of that size.
        """

    def retire(self, digests: Collection[bytes]) -> None:
        """The weights of these namespaces are gone, unless another client has them: their blocks
        are evicted before all others, until the namespace is registered again."""

    def find(self, keys: Sequence[BlockKey]) -> Found:
        """Longest prefix of ``keys`` known to be present. No side effect on recency; counts as a
        lookup unless it is pending."""

    def locate(self, keys: Sequence[BlockKey]) -> Located:
        """Which of ``keys`` are known to be present, in any order and with gaps: sliding windows
        and recurrent states need single blocks of a sequence. Otherwise as ``find``; a lookup
        beyond this host is started for every key whose state is not known."""

    def why(self, key: BlockKey) -> Absence | None:
        """Why a block was not found, from what is remembered of this very key, and of the same
        block hash in other namespaces. None while the answer is on its way: call again. Does not
        wait."""

    def acquire(
        self,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> int:
        """Leases the present prefix of ``keys`` and starts promoting the blocks that are not in the
        host, charged to ``tenant``. ``parent`` and ``parents`` as for ``reserve``.

        Returns a ticket for ``poll``/``release``. After ``deadline_s`` seconds the recall is
        READY with the blocks that have arrived. Does not count as a use: ``touch`` does.
        """

    def poll(self, ticket: int) -> Recall:
        """State of an acquisition; does not wait. Unknown ticket: KeyError (a bug)."""

    def read(self, offsets: Sequence[int], at: int, nbytes: int) -> list[bytes]:
        """Bytes ``[at, at + nbytes)`` of the records at these offsets, one for each. They must be
        leased, or reserved by the caller. Empty if the arena cannot be read."""

    def release(self, ticket: int) -> None:
        """Releases all leases of a ticket, finished or not. Idempotent."""

    def reserve(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> tuple[Reservation, ...]:
        """Reserves slots for ``keys`` (a chain, prefix first). Evicts if needed: blocks
        of ``tenant`` if its limit would be exceeded, else the least valuable ones.

        ``parent``: key before ``keys[0]`` if the chain starts in the middle of a sequence.

        ``parents``: one for each key, if they are not one chain. Of a link of a chain: the key
        before it, None for the first; so that the chains of many sequences, one after the other,
        take one call. Of a block that *hangs* on a chain, as a window or a state does: the block
        of the chain without which it is worth nothing; reserve the chain first. Raises ValueError
        if it is of another length, or given together with ``parent``.
        """

    def commit(self, keys: Sequence[BlockKey]) -> None:
        """The slots reserved for ``keys`` are filled: publishes them, and writes them to the
        lower tier when the write policy says so. Keys not reserved are ignored."""

    def abandon(self, keys: Sequence[BlockKey]) -> None:
        """Returns reserved slots unfilled. Keys not reserved are ignored."""

    def touch(
        self,
        keys: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        hint: Hint | None = None,
        tenant: Tenant = SHARED,
    ) -> None:
        """The chain ``keys`` (prefix first) was used: refreshes recency in every tier.

        Once per request, on arrival, with all its full blocks, in the pool or not: policies also
        learn from misses.

        ``hanging``: the windows and states that the request needs to use the chain, in the pool or
        not. ``ending``: those at its own end, which a request that continues it will need: in the
        pool, or to be saved. Both may be reported later than the chain, with no ``keys``. All
        others are not named: they age.

        ``hint``: what the client says about the return of the chain; believed as far as hints of
        ``tenant`` came true so far.
        """

    def flush(self, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        """Waits until every committed block of ``keys`` is durable in the lowest local tier.
        True if so, False on the deadline or if one was shed. Without a disk the remote tier
        counts; with nothing below: True at once."""

    def clear(self) -> None:
        """Drops every block not leased, from every tier."""

    def stats(self) -> PoolStats: ...

    def close(self) -> None:
        """Finishes queued writes (bounded), then frees everything. Idempotent."""
