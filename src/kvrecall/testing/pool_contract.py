"""The contract of every pool. Subclass ``PoolContract`` in a test module and give it a pool."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrecall.block import NAMESPACE_BYTES, SHARED, BlockKey, Tenant, TierName
from kvrecall.errors import ConfigError
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Absence, PoolClient, Presence, Recall, RecallState, Verdict
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Refusal
from kvrecall.pool.hints import Hint
from kvrecall.testing import chain, content, namespace, wait_until

BLOCK_BYTES = 60_000
SLOT_BYTES = 61_440
NAMESPACE = namespace()


class Engine:
    """Plays an engine: saves blocks into a pool and recalls them, checking every byte."""

    def __init__(self, pool: PoolClient, block_bytes: int = BLOCK_BYTES) -> None:
        self.pool = pool
        self.block_bytes = block_bytes
        self._arena = Arena.attach(pool.arena_handle())

    def fill(self, key: BlockKey, offset: int) -> None:
        """Writes what the block ``key`` must hold into a reserved slot."""
        self._arena.view(offset, self.block_bytes)[:] = content(key, self.block_bytes)

    def save(
        self,
        keys: Sequence[BlockKey],
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey] | None = None,
    ) -> Counter[Verdict]:
        """Reserves, fills and commits; returns how many answers there were of each kind."""
        answers = self.pool.reserve(keys, None, tenant, parents)
        reserved = [
            (key, answer.offset)
            for key, answer in zip(keys, answers, strict=True)
            if answer.verdict is Verdict.RESERVED
        ]
        for key, offset in reserved:
            self.fill(key, offset)
        self.pool.commit([key for key, _ in reserved])
        return Counter(answer.verdict for answer in answers)

    def wait(self, ticket: int) -> Recall:
        """Polls until READY."""
        recalls: list[Recall] = []

        def ready() -> bool:
            recalls.append(self.pool.poll(ticket))
            return recalls[-1].state is RecallState.READY

        wait_until(ready)
        return recalls[-1]

    def recall(
        self,
        keys: Sequence[BlockKey],
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey] | None = None,
    ) -> tuple[TierName, ...]:
        """Acquires, checks the bytes, releases; returns the tier of each block that came."""
        ticket = self.pool.acquire(keys, 60.0, None, tenant, parents)
        recall = self.wait(ticket)
        self.check(keys, recall)
        self.pool.release(ticket)
        return recall.tiers

    def why(self, key: BlockKey) -> Absence:
        """Asks until the answer is there."""
        answers: list[Absence | None] = []

        def is_there() -> bool:
            answers.append(self.pool.why(key))
            return answers[-1] is not None

        wait_until(is_there)
        found = answers[-1]
        assert found is not None
        return found

    def check(self, keys: Sequence[BlockKey], recall: Recall) -> None:
        assert len(recall.offsets) == len(recall.tiers)
        for key, offset in zip(keys, recall.offsets, strict=False):
            assert offset % 4096 == 0
            got = bytes(self._arena.view(offset, self.block_bytes))
            assert got == content(key, self.block_bytes), "wrong KV"

    def close(self) -> None:
        self._arena.close()

    def end(self) -> None:
        """Closes the engine and its pool."""
        self.close()
        self.pool.close()


Start = Callable[..., Engine]


@contextmanager
def engines(make: Callable[..., PoolClient], disk_path: Path) -> Iterator[Start]:
    """Yields a function that starts a pool with room for ``blocks`` in the host, and an engine on
    it; closes them all. ``make``: as ``PoolContract.make``, with further arguments."""
    started: list[Engine] = []

    def start(*more: object, blocks: int = 64, disk: bool = True) -> Engine:
        pool = make(blocks * SLOT_BYTES, disk_path if disk else None, *more)
        pool.register(NAMESPACE, BLOCK_BYTES)
        started.append(Engine(pool))
        return started[-1]

    yield start
    for engine in started:
        engine.end()


class PoolContract:
    """Contract of ``kvrecall.pool.base.PoolClient``. A subclass overrides ``make``."""

    def make(self, host_bytes: int, disk_path: Path | None) -> PoolClient:
        """A pool with an arena of ``host_bytes``; with a disk of at least 64 MiB if ``path`` is
        given."""
        raise NotImplementedError

    def drop(self, pool: PoolClient, keys: Sequence[BlockKey]) -> None:
        """Drops blocks, in the way of that pool."""
        assert isinstance(pool, Pool)
        pool.drop(keys)

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Start]:
        """See ``engines``."""
        with engines(self.make, tmp_path / "disk") as start:
            yield start

    def on_disk(self, start: Start, keys: Sequence[BlockKey]) -> Engine:
        """An engine whose pool has ``keys`` on disk only."""
        engine = start()
        engine.save(keys)
        assert engine.pool.flush(keys, 60.0)
        engine.end()
        return start()

    @pytest.mark.parametrize("disk", [False, True])
    def test_saved_chain_is_found_and_recalled(self, start: Start, disk: bool) -> None:
        engine = start(disk=disk)
        keys = chain(NAMESPACE, 20)
        assert engine.pool.find(keys).blocks == 0
        assert engine.save(keys) == {Verdict.RESERVED: 20}
        assert engine.pool.find(keys).tiers == (TierName.HOST,) * 20
        assert engine.recall(keys) == (TierName.HOST,) * 20

    def test_it_knows_why_a_block_is_missing(self, start: Start) -> None:
        engine = start(blocks=8, disk=False)
        keys, others = chain(NAMESPACE, 4, "a"), chain(NAMESPACE, 8, "b")
        assert engine.why(keys[0]) == Absence(Presence.UNKNOWN)
        answers = engine.pool.reserve(keys)
        assert engine.why(keys[0]).presence is Presence.FILLING
        for key, answer in zip(keys, answers, strict=True):
            engine.fill(key, answer.offset)
        engine.pool.commit(keys)
        assert engine.why(keys[0]).presence is Presence.HERE
        self.drop(engine.pool, keys[3:])
        left = engine.why(keys[3])
        assert (left.presence, left.tier, left.cause) == (Presence.GONE, "host", Cause.DROPPED)
        assert left.at > 0
        engine.save(others)
        gone = [engine.why(key) for key in keys[:3]]
        assert {(one.presence, one.cause) for one in gone} == {(Presence.GONE, Cause.CAPACITY)}
        ticket = engine.pool.acquire(others, 60.0)
        engine.wait(ticket)
        assert engine.save(keys[:1]) == {Verdict.REFUSED: 1}
        refused = engine.why(keys[0])
        assert (refused.presence, refused.cause) == (Presence.REFUSED, Refusal.ROOM)
        engine.pool.release(ticket)
        engine.save(keys[:1])
        assert engine.why(keys[0]).presence is Presence.HERE

    def test_slots_of_a_chain_are_adjacent_and_ascending_up_to_the_last(self, start: Start) -> None:
        engine, keys = start(blocks=64, disk=False), chain(NAMESPACE, 64)
        offsets = [answer.offset for answer in engine.pool.reserve(keys)]
        steps = [after - before for before, after in itertools.pairwise(offsets)]
        assert steps == [SLOT_BYTES] * 63
        engine.pool.abandon(keys)
        assert engine.save(keys) == {Verdict.RESERVED: 64}
        assert engine.pool.find(keys).blocks == 64

    def test_finds_the_longest_prefix_only_and_counts_it(self, start: Start) -> None:
        engine, keys = start(disk=False), chain(NAMESPACE, 10)
        engine.save(keys[:4])
        engine.save(keys[6:])
        assert engine.pool.find(keys).blocks == 4
        stats = engine.pool.stats()
        assert (stats.lookups, stats.hits) == (10, 4)
        assert (stats.tiers[0].blocks, stats.tiers[0].used_bytes) == (8, 8 * SLOT_BYTES)
        assert len(engine.recall(keys)) == 4
        assert engine.pool.find(keys[6:]).blocks == 4

    @pytest.mark.parametrize("disk", [False, True])
    def test_locates_single_blocks_with_gaps(self, start: Start, disk: bool) -> None:
        engine = start(disk=disk)
        keys = chain(NAMESPACE, 10)
        assert engine.pool.locate(keys).tiers == (None,) * 10
        engine.save(keys[2:4])
        engine.save(keys[6:7])
        engine.pool.reserve(keys[8:9])
        host = TierName.HOST
        there = (None, None, host, host, None, None, host, None, None, None)
        located = engine.pool.locate(keys)
        assert (located.tiers, located.pending, located.blocks) == (there, False, 3)
        assert engine.pool.locate(keys[::-1]).tiers == there[::-1]
        assert engine.pool.locate([keys[2], keys[2], keys[0]]).tiers == (host, host, None)
        assert engine.pool.locate([]).tiers == ()

    def test_locating_is_no_use(self, start: Start) -> None:
        """It counts as a lookup, and leaves the order of eviction as it is."""
        engine = start(blocks=8, disk=False)
        old, new = chain(NAMESPACE, 4, "old"), chain(NAMESPACE, 4, "new")
        engine.save(old)
        engine.save(new)
        engine.pool.locate([*old, *chain(NAMESPACE, 2, "absent")])
        stats = engine.pool.stats()
        assert (stats.lookups, stats.hits) == (6, 4)
        engine.save(chain(NAMESPACE, 4, "newer"))
        assert engine.pool.locate(old).blocks == 0
        assert engine.pool.locate(new).blocks == 4

    def test_reserved_blocks_are_not_found_and_abandoned_slots_are_free(self, start: Start) -> None:
        engine, keys = start(blocks=8, disk=False), chain(NAMESPACE, 8)
        for _ in range(3):
            assert {answer.verdict for answer in engine.pool.reserve(keys)} == {Verdict.RESERVED}
            assert engine.pool.find(keys).blocks == 0
            assert engine.recall(keys) == ()
            assert engine.pool.stats().reserved == 8
            engine.pool.abandon(keys)
            assert engine.pool.stats().reserved == 0
        engine.pool.commit(keys)
        assert engine.pool.find(keys).blocks == 0

    def test_the_same_key_twice_in_one_call(self, start: Start) -> None:
        engine = start(blocks=8, disk=False)
        key = chain(NAMESPACE, 1)[0]
        answers = engine.pool.reserve([key, key])
        assert [a.verdict for a in answers] == [Verdict.RESERVED, Verdict.PRESENT]
        engine.fill(key, answers[0].offset)
        engine.pool.commit([key, key])
        assert engine.recall([key, key]) == (TierName.HOST,) * 2
        assert engine.pool.stats().leases == 0

    def test_leased_and_reserved_blocks_are_not_evicted(self, start: Start) -> None:
        engine = start(blocks=16, disk=False)
        keys = chain(NAMESPACE, 10)
        engine.save(keys)
        ticket = engine.pool.acquire(keys, 60.0)
        other = chain(NAMESPACE, 10, "other")
        assert engine.save(other) == {Verdict.RESERVED: 6, Verdict.REFUSED: 4}
        assert engine.save(chain(NAMESPACE, 10, "third"))[Verdict.RESERVED] == 6
        engine.check(keys, engine.wait(ticket))
        assert engine.pool.find(keys).blocks == 10
        engine.pool.release(ticket)
        engine.pool.release(ticket)
        assert engine.save(chain(NAMESPACE, 16, "fourth")) == {Verdict.RESERVED: 16}
        reserved = chain(NAMESPACE, 14, "fifth")
        engine.pool.reserve(reserved)
        refused = engine.pool.stats().refused
        assert engine.save(keys) == {Verdict.RESERVED: 2, Verdict.REFUSED: 8}
        assert engine.pool.stats().refused == refused + 8
        assert engine.save(reserved) == {Verdict.PRESENT: 14}, "by one only"

    def test_saving_a_suffix_does_not_evict_its_own_prefix(self, start: Start) -> None:
        engine = start(blocks=8, disk=False)
        keys = chain(NAMESPACE, 12)
        engine.save(keys[:6])
        engine.save(chain(NAMESPACE, 2, "other"))
        assert engine.save(keys) == {Verdict.PRESENT: 6, Verdict.RESERVED: 2, Verdict.REFUSED: 4}
        assert engine.pool.find(keys).blocks == 8

    def test_hints_are_recorded(self, start: Start) -> None:
        engine = start(blocks=16, disk=False)
        keys = chain(NAMESPACE, 4, "hinted")
        engine.save(keys)
        engine.pool.touch(keys, hint=Hint(returns=True, in_s=0.0))
        engine.pool.touch(keys)
        assert engine.recall(keys) == (TierName.HOST,) * 4
        stats = engine.pool.stats()
        assert (stats.hints, stats.hints_believed) == (1, 0)
        assert (stats.hints_true, stats.hints_false) == (1, 0)

    def test_suffixes_leave_before_prefixes(self, start: Start) -> None:
        engine = start(blocks=16, disk=False)
        old, new = chain(NAMESPACE, 12, "old"), chain(NAMESPACE, 8, "new")
        engine.save(old)
        assert engine.recall(old) == (TierName.HOST,) * 12
        engine.pool.touch(old)
        engine.save(new)
        assert engine.pool.find(old).blocks == 8

    def test_what_hangs_on_a_chain_leaves_before_it(self, start: Start) -> None:
        engine = start(blocks=16, disk=False)
        pool, windows = engine.pool, namespace("windows")
        pool.register(windows, BLOCK_BYTES)
        keys, hanging = chain(NAMESPACE, 6), chain(windows, 2)
        engine.save(keys)
        assert engine.save(hanging, parents=[keys[2], keys[5]]) == {Verdict.RESERVED: 2}
        pool.touch(keys, hanging=hanging[1:])
        other = chain(NAMESPACE, 9, "other")
        assert engine.save(other) == {Verdict.RESERVED: 9}
        assert pool.locate(hanging).tiers == (None, TierName.HOST), "the one not used goes first"
        engine.save(chain(NAMESPACE, 10, "other"))
        assert pool.locate(hanging).blocks == 0
        assert pool.find(keys).blocks == 6
        pool.touch([], hanging)

    def test_a_block_is_not_evicted_for_what_hangs_on_it(self, start: Start) -> None:
        engine = start(blocks=8, disk=False)
        windows = namespace("windows")
        engine.pool.register(windows, BLOCK_BYTES)
        keys, hanging = chain(NAMESPACE, 8), chain(windows, 3)
        engine.save(keys)
        reserved = engine.save(hanging, parents=keys[5:])
        assert reserved == {Verdict.REFUSED: 3}, "each other block is the parent of one"
        assert engine.pool.find(keys).blocks == 8
        assert engine.pool.stats().leases == 0

    def test_the_chains_of_many_sequences_take_one_call(self, start: Start) -> None:
        """Each is answered as if it had been reserved alone, the first ones first."""
        engine = start(blocks=8, disk=False)
        one, two, three = (chain(NAMESPACE, 4, name) for name in ("one", "two", "three"))
        engine.save(one[:2])
        kept = engine.pool.acquire(one[:2], 60.0)
        keys = [*one, *two, *three, *two[:1], *three[-1:]]
        parents = [None, *one[:-1], None, *two[:-1], None, *three[:-1], None, three[-2]]
        answers = engine.pool.reserve(keys, parents=parents)
        present, reserved, refused = Verdict.PRESENT, Verdict.RESERVED, Verdict.REFUSED
        assert [answer.verdict for answer in answers] == [
            *[present] * 2, *[reserved] * 2,
            *[reserved] * 4,
            *[refused] * 4,
            present, refused,
        ]  # fmt: skip
        assert engine.pool.stats().refused == 5
        assert len({answer.offset for answer in answers if answer.offset >= 0}) == 6
        for key, answer in zip(keys, answers, strict=True):
            if answer.verdict is reserved:
                engine.fill(key, answer.offset)
        engine.pool.commit([*one, *two])
        for keys in (one, two):
            assert engine.recall(keys) == (TierName.HOST,) * 4
        engine.pool.release(kept)
        engine.pool.touch(one)
        engine.save(chain(NAMESPACE, 1, "other"))
        assert engine.pool.find(two).blocks == 3, "a chain leaves from its end"

    def test_a_tail_takes_free_room_only_and_leaves_first(self, start: Start) -> None:
        engine = start(blocks=8, disk=False)
        keys, other = chain(NAMESPACE, 6), chain(NAMESPACE, 2, "other")
        old, used = (NAMESPACE.tail_key(key[NAMESPACE_BYTES:]) for key in keys[:2])
        engine.save(keys[:5])
        for tail in (old, used):
            assert engine.save([tail], parents=[keys[4]]) == {Verdict.RESERVED: 1}
        engine.pool.touch(keys)
        engine.pool.touch((), hanging=[old])
        engine.pool.touch((), hanging=[used])
        assert engine.save(keys) == {Verdict.PRESENT: 5, Verdict.RESERVED: 1}
        late = NAMESPACE.tail_key(b"late")
        assert engine.save([late], parents=[keys[4]]) == {Verdict.REFUSED: 1}
        assert engine.save(other[:1]) == {Verdict.RESERVED: 1}
        assert engine.pool.locate([old, used]).tiers == (None, TierName.HOST)
        assert engine.save(other) == {Verdict.PRESENT: 1, Verdict.RESERVED: 1}
        assert engine.pool.locate([old, used]).blocks == 0
        assert engine.pool.locate([*keys, *other]).blocks == 8
        assert engine.save([late], parents=[keys[4]]) == {Verdict.REFUSED: 1}
        assert engine.pool.locate([*keys, *other]).blocks == 8

    def test_parents_are_those_of_a_chain_or_one_each(self, start: Start) -> None:
        pool = start(disk=False).pool
        keys = chain(NAMESPACE, 3)
        for call in (pool.reserve, lambda *more, **given: pool.acquire(more[0], 1.0, **given)):
            with pytest.raises(ValueError, match="2 parents of 3 blocks"):
                call(keys, parents=[None, None])
            with pytest.raises(ValueError, match="either the parent of a chain"):
                call(keys, parent=keys[0], parents=[None] * 3)
        assert pool.stats().reserved == 0
        assert pool.locate(keys).blocks == 0

    def test_hanging_blocks_come_back_from_the_disk(self, start: Start) -> None:
        engine = start()
        keys, windows = chain(NAMESPACE, 6), namespace("windows")
        engine.pool.register(windows, BLOCK_BYTES)
        hanging = chain(windows, 3)
        engine.save(keys)
        engine.save(hanging, parents=keys[::2])
        assert engine.pool.flush([*keys, *hanging], 60.0)
        engine.end()
        engine = start()
        engine.pool.register(windows, BLOCK_BYTES)
        disk, host = TierName.DISK, TierName.HOST
        missing = chain(windows, 4)[3:]
        assert engine.pool.locate([*missing, *hanging]).tiers == (None, disk, disk, disk)
        assert engine.recall(hanging[1:], parents=keys[2::2]) == (disk,) * 2
        assert engine.pool.locate(hanging).tiers == (disk, host, host)

    def test_what_cannot_be_is_refused(self, start: Start) -> None:
        pool = start(blocks=4, disk=False).pool
        for name, nbytes, why in (
            ("huge", 5 * SLOT_BYTES, "cannot hold one block"),
            ("model", 4096, "blocks of 60000 bytes"),
            ("none", 0, "more than 0"),
        ):
            with pytest.raises(ConfigError, match=why):
                pool.register(namespace(name), nbytes)
        strange = chain(namespace("strange"), 2)
        assert pool.locate(strange).tiers == (None, None)
        with pytest.raises(KeyError):
            pool.reserve(strange)
        ticket = pool.acquire([], 1.0)
        pool.release(ticket)
        with pytest.raises(KeyError):
            pool.poll(ticket)

    def test_flush_makes_durable_and_a_new_pool_finds(self, start: Start) -> None:
        keys = chain(NAMESPACE, 30)
        engine = self.on_disk(start, keys)
        assert engine.pool.find(keys).tiers == (TierName.DISK,) * 30
        assert engine.save(keys) == {Verdict.PRESENT: 30}
        assert engine.recall(keys) == (TierName.DISK,) * 30
        assert engine.recall(keys) == (TierName.HOST,) * 30
        assert not engine.pool.flush([*keys, *chain(NAMESPACE, 1, "never got")], 5.0)

    def test_flush_without_a_disk_is_true_at_once(self, start: Start) -> None:
        assert start(disk=False).pool.flush(chain(NAMESPACE, 3), 0.0)

    def test_recall_of_more_than_fits_is_cut(self, start: Start) -> None:
        engine = start(blocks=16)
        keys = chain(NAMESPACE, 32)
        for part in (keys[:8], keys[8:16], keys[16:24], keys[24:]):
            engine.save(part)
            assert engine.pool.flush(part, 60.0)
        assert engine.pool.find(keys).blocks == 32
        tiers = engine.recall(keys)
        assert 8 <= len(tiers) <= 16
        assert engine.pool.stats().leases == 0

    def test_two_recalls_share_one_load(self, start: Start) -> None:
        keys = chain(NAMESPACE, 10)
        engine = self.on_disk(start, keys)
        tickets = [engine.pool.acquire(keys, 60.0) for _ in range(3)]
        recalls = [engine.wait(ticket) for ticket in tickets]
        assert {recall.offsets for recall in recalls} == {recalls[0].offsets}
        assert len(recalls[0].offsets) == 10
        for ticket in tickets:
            engine.pool.release(ticket)
        disk = next(t for t in engine.pool.stats().tiers if t.name == TierName.DISK)
        assert disk.reads == 10
        assert engine.pool.stats().leases == 0

    @pytest.mark.parametrize("disk", [False, True])
    def test_clear_drops_all_that_is_not_leased(self, start: Start, disk: bool) -> None:
        engine = start(disk=disk)
        keys = chain(NAMESPACE, 20)
        engine.save(keys)
        ticket = engine.pool.acquire(keys[:5], 60.0)
        engine.pool.clear()
        assert engine.pool.find(keys).tiers == (TierName.HOST,) * 5
        assert engine.pool.find(keys[5:]).blocks == 0
        engine.check(keys, engine.wait(ticket))
        engine.pool.release(ticket)
        engine.pool.clear()
        assert engine.pool.find(keys).blocks == 0
        wait_until(lambda: engine.pool.stats().queued_writes == 0)
        assert engine.save(keys) == {Verdict.RESERVED: 20}
        assert engine.recall(keys) == (TierName.HOST,) * 20
        assert engine.pool.flush(keys, 60.0)

    @pytest.mark.parametrize("disk", [False, True])
    def test_drop_of_some_blocks(self, start: Start, disk: bool) -> None:
        engine = start(disk=disk)
        keys = chain(NAMESPACE, 10)
        engine.save(keys)
        assert engine.pool.flush(keys, 60.0)
        self.drop(engine.pool, [*keys[4:6], keys[4]])  # twice is once
        assert engine.pool.find(keys).blocks == 4
        assert engine.pool.find(keys[6:]).blocks == 4
        assert engine.save(keys) == {Verdict.PRESENT: 8, Verdict.RESERVED: 2}
        assert engine.recall(keys) == (TierName.HOST,) * 10

    def test_namespaces_of_other_block_sizes_share_the_arena(self, start: Start) -> None:
        engine = start(blocks=64, disk=False)
        small, large = namespace("small"), namespace("large")
        engine.pool.register(small, 1000)
        engine.pool.register(large, 10 * SLOT_BYTES)
        assert engine.save(chain(NAMESPACE, 64)) == {Verdict.RESERVED: 64}
        little, big = Engine(engine.pool, 1000), Engine(engine.pool, 10 * SLOT_BYTES)
        assert little.save(chain(small, 20)) == {Verdict.RESERVED: 20}
        assert little.recall(chain(small, 20)) == (TierName.HOST,) * 20
        assert big.save(chain(large, 2)) == {Verdict.RESERVED: 2}
        assert big.recall(chain(large, 2)) == (TierName.HOST,) * 2
        kept = engine.pool.find(chain(NAMESPACE, 64)).blocks
        assert engine.recall(chain(NAMESPACE, 64)) == (TierName.HOST,) * kept
        assert kept >= 30
        engine.pool.clear()
        assert engine.save(chain(NAMESPACE, 64)) == {Verdict.RESERVED: 64}
        little.close()
        big.close()

    def test_room_with_slots_being_filled_is_not_taken_over(self, start: Start) -> None:
        engine = start(blocks=256, disk=False)
        small = namespace("small")
        engine.pool.register(small, 1000)
        keys = chain(NAMESPACE, 256)
        for key, answer in zip(keys, engine.pool.reserve(keys), strict=True):
            engine.fill(key, answer.offset)
        engine.pool.commit(keys[::2])
        little = Engine(engine.pool, 1000)
        assert little.save(chain(small, 4)) == {Verdict.REFUSED: 4}
        engine.pool.abandon(keys[1:128:2])
        assert little.save(chain(small, 4)) == {Verdict.RESERVED: 4}
        engine.pool.commit(keys[129::2])
        assert engine.recall(keys[128:]) == (TierName.HOST,) * 128
        little.close()

    def test_close_is_idempotent_and_ends_everything(self, start: Start) -> None:
        engine = start()
        keys = chain(NAMESPACE, 4)
        engine.save(keys)
        engine.pool.close()
        engine.pool.close()
        assert engine.pool.find(keys).blocks == 0
        assert engine.pool.locate(keys).tiers == (None,) * 4
        assert {a.verdict for a in engine.pool.reserve(keys)} == {Verdict.REFUSED}
        again = start()
        assert again.pool.find(keys).blocks == 4  # close finished the queued writes
