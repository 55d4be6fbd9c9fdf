"""The contract of every pool for tenants, pins, sizes and write policies. Subclass
``TermsContract`` in a test module and give it a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrecall.block import SHARED, Tenant, TierName, tenant_of
from kvrecall.config import Amount, PoolTerms, TenantRules, TenantTerms, Watermarks
from kvrecall.errors import ConfigError
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.base import PoolClient, Presence, TierStats, Verdict
from kvrecall.pool.departures import Refusal
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.hints import Hint
from kvrecall.pool.pool import Pool
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine, engines

ANN, BOB, EVE = map(tenant_of, ("ann", "bob", "eve"))
QUARTER = PoolTerms(tenants=TenantRules(TenantTerms(Amount(share=0.25), Amount(share=0.25))))
MIB = 1 << 20

Start = Callable[..., Engine]


def keys_of(name: str, length: int) -> list:  # type: ignore[type-arg]
    return chain(NAMESPACE, length, name)


class TermsContract:
    """A subclass overrides ``make``, and ``pool_of`` if its pool is a client of another."""

    def make(self, host_bytes: int, disk_path: Path | None, terms: PoolTerms) -> PoolClient:
        """A pool with an arena of ``host_bytes``; with a disk of 64 MiB if there is a path."""
        raise NotImplementedError

    def pool_of(self, pool: PoolClient) -> Pool:
        assert isinstance(pool, Pool)
        return pool

    def admin(self, engine: Engine) -> PoolAdmin:
        """The admin of the pool, after everything sent to the pool before has arrived."""
        engine.pool.find(())
        return self.pool_of(engine.pool).admin

    def disk(self, engine: Engine) -> DiskTier:
        disk = self.admin(engine).disk
        assert disk is not None
        return disk

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Start]:
        with engines(self.make, tmp_path / "disk") as start:
            yield start

    def test_a_pool_that_its_operator_has_set_to_be_read(self, start: Start) -> None:
        """What others wrote before is recalled; nothing is saved or cleared by an engine."""
        writer = start(PoolTerms())
        keys = keys_of("a", 8)
        writer.save(keys)
        assert writer.pool.flush(keys, 30.0)
        writer.end()
        reader = start(PoolTerms(read_only=True))
        assert len(reader.recall(keys)) == 8
        assert reader.save([*keys, *keys_of("b", 2)]) == {Verdict.PRESENT: 8, Verdict.REFUSED: 2}
        reader.pool.clear()
        assert reader.pool.find(keys).blocks == 8
        assert self.disk(reader).stats().blocks == 8

    def test_a_namespace_that_its_operator_has_set_to_be_read(
        self, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Beside one that engines write: they recall its blocks, and neither save, clear nor retire
        them. The log says so once."""
        writer, other = start(PoolTerms()), namespace("other weights")
        keys, theirs = keys_of("a", 8), chain(other, 3, "a")
        writer.save(keys)
        assert writer.pool.flush(keys, 30.0)
        writer.end()
        marked = PoolTerms(read_only_namespaces=("0" * 8, NAMESPACE.digest.hex()[:8]))
        engine, new = start(marked), keys_of("b", 2)
        engine.pool.register(other, BLOCK_BYTES)
        for _ in range(2):
            assert engine.save([*keys, *new]) == {Verdict.PRESENT: 8, Verdict.REFUSED: 2}
        refused = engine.why(new[0])
        assert (refused.presence, refused.cause) == (Presence.REFUSED, Refusal.READ_ONLY)
        assert engine.save([*theirs, *new]) == {Verdict.RESERVED: 3, Verdict.REFUSED: 2}
        assert self.pool_of(engine.pool).stats().refused == 6
        assert [NAMESPACE.digest.hex() in line for line in caplog.messages].count(True) == 1
        engine.pool.retire([NAMESPACE.digest])
        assert engine.pool.find(keys).blocks == 8
        assert self.pool_of(engine.pool)._retired == frozenset()
        engine.pool.clear()
        assert (engine.pool.find(keys).blocks, engine.pool.find(theirs).blocks) == (8, 0)
        assert engine.recall(keys) == (TierName.DISK,) * 8

    def test_blocks_of_weights_that_are_gone_go_first(self, start: Start) -> None:
        """Though they were used last; not once the weights are back."""
        engine, other = start(PoolTerms(), blocks=24), namespace("other weights")
        pool = self.pool_of(engine.pool)
        engine.pool.register(other, BLOCK_BYTES)
        ours, theirs = keys_of("a", 8), chain(other, 8, "a")
        for keys in (ours, theirs):
            engine.save(keys)
            assert engine.pool.flush(keys, 30.0)

        engine.pool.retire([other.digest])
        engine.pool.find(())
        wait_until(lambda: len(pool._host.leaving) == 8)
        wait_until(lambda: len(self.disk(engine).catalog.leaving) == 8)
        engine.pool.touch(theirs)
        engine.save(keys_of("b", 20))
        here = {block.key for block in pool.host_blocks()}
        assert (len(here & {*ours}), len(here & {*theirs})) == (4, 0), "twelve had to go"
        engine.recall(theirs[:4])
        engine.pool.register(other, BLOCK_BYTES)
        assert pool._host.retired == self.disk(engine).catalog.retired == frozenset()
        assert engine.pool.find(theirs).blocks == 8

    # -- limits of tenants -----------------------------------------------------------------

    def test_a_flood_takes_nothing_of_those_within_their_share(self, start: Start) -> None:
        engine = start(QUARTER, disk=False)
        quiet = {tenant: keys_of(tenant, 12) for tenant in (ANN, BOB, SHARED)}
        for tenant, keys in quiet.items():
            assert engine.save(keys, tenant) == {Verdict.RESERVED: 12}
        for number in range(60):
            engine.save(keys_of(f"flood {number}", 4), EVE)
            assert held(self.admin(engine), EVE) <= 16 * SLOT_BYTES
        assert all(engine.pool.find(keys).blocks == 12 for keys in quiet.values())
        host = engine.pool.stats().tiers[0]
        assert host.quota_evictions == 60 * 4 - 16
        assert engine.pool.find(keys_of("flood 59", 4)).blocks == 4, "the youngest stay"

    def test_a_chain_longer_than_the_share_is_cut_and_counted(self, start: Start) -> None:
        engine = start(QUARTER, disk=False)
        keys = keys_of("long", 40)
        assert engine.save(keys, EVE) == {Verdict.RESERVED: 16, Verdict.REFUSED: 24}
        assert engine.pool.find(keys).blocks == 16
        assert engine.pool.stats().tiers[0].over_quota == 24
        assert engine.save(keys_of("other", 8), ANN) == {Verdict.RESERVED: 8}

    def test_a_tenant_gives_up_its_suffixes_first(self, start: Start) -> None:
        engine = start(QUARTER, disk=False)
        old = keys_of("old", 12)
        engine.save(old, ANN)
        engine.pool.touch(old)
        engine.save(keys_of("new", 8), ANN)
        assert engine.pool.find(old).blocks == 8

    def test_tails_take_only_what_a_tenants_blocks_leave(self, start: Start) -> None:
        engine = start(QUARTER, disk=False)
        keys = keys_of("ann", 16)
        tail, late = NAMESPACE.tail_key(b"tail"), NAMESPACE.tail_key(b"late")
        engine.save(keys[:15], ANN)
        assert engine.save([tail], ANN, [keys[14]]) == {Verdict.RESERVED: 1}
        assert engine.save([late], ANN, [keys[14]]) == {Verdict.REFUSED: 1}
        assert engine.save(keys, ANN) == {Verdict.PRESENT: 15, Verdict.RESERVED: 1}
        assert engine.pool.locate([tail]).blocks == 0
        assert engine.save([late], ANN, [keys[14]]) == {Verdict.REFUSED: 1}
        assert engine.pool.find(keys).blocks == 16

    def test_leased_blocks_of_a_tenant_stay(self, start: Start) -> None:
        engine = start(QUARTER, disk=False)
        keys = keys_of("leased", 10)
        engine.save(keys, ANN)
        ticket = engine.pool.acquire(keys, 60.0, None, ANN)
        assert engine.save(keys_of("more", 16), ANN)[Verdict.RESERVED] == 6
        engine.check(keys, engine.wait(ticket))
        engine.pool.release(ticket)

    def test_own_terms_of_a_tenant_stand_for_all_others(self, start: Start) -> None:
        named = {EVE: TenantTerms(Amount(5 * SLOT_BYTES)), SHARED: TenantTerms()}
        rules = TenantRules(TenantTerms(Amount(share=0.25)), named)
        engine = start(PoolTerms(tenants=rules), disk=False)
        assert engine.save(keys_of("eve", 10), EVE)[Verdict.RESERVED] == 5
        assert engine.save(keys_of("ann", 20), ANN)[Verdict.RESERVED] == 16
        assert engine.save(keys_of("all", 40))[Verdict.RESERVED] == 40

    def test_limits_hold_on_disk_and_after_a_restart(self, start: Start) -> None:
        limit = 40 * SLOT_BYTES
        rules = TenantRules(TenantTerms(None, Amount(limit)))
        engine = start(PoolTerms(tenants=rules))
        quiet = keys_of("quiet", 30)
        engine.save(quiet, ANN)
        assert engine.pool.flush(quiet, 60.0)
        for number in range(8):
            flood = keys_of(f"flood {number}", 10)
            engine.save(flood, EVE)
            assert engine.pool.flush(flood, 60.0)
        disk = self.disk(engine)
        assert {use.tenant: use.used_bytes for use in disk.catalog.tenants()} == {
            ANN: 30 * SLOT_BYTES,
            EVE: limit,
        }
        assert tier(engine, TierName.DISK).quota_evictions == 40
        engine.close()
        engine.pool.close()
        engine = start(PoolTerms(tenants=rules))
        assert engine.pool.find(quiet).tiers == (TierName.DISK,) * 30
        more = keys_of("more", 10)
        engine.save(more, EVE)
        assert engine.pool.flush(more, 60.0)
        assert tier(engine, TierName.DISK).quota_evictions == 10
        assert engine.pool.find(quiet).blocks == 30

    def test_a_chain_longer_than_the_share_of_the_disk_keeps_its_beginning(
        self, start: Start
    ) -> None:
        rules = TenantRules(TenantTerms(None, Amount(20 * SLOT_BYTES)))
        engine = start(PoolTerms(tenants=rules))
        keys = keys_of("long", 32)
        for part in (keys[:8], keys[8:16], keys[16:24], keys[24:]):
            place = keys.index(part[0])
            answers = engine.pool.reserve(part, keys[place - 1] if place else None, ANN)
            for key, answer in zip(part, answers, strict=True):
                engine.fill(key, answer.offset)
            engine.pool.commit(part)
            wait_until(lambda: engine.pool.stats().queued_writes == 0)
        disk = self.disk(engine)
        kept = "".join(".#"[disk.contains(key)] for key in keys)
        assert kept == "#" * 20 + "." * 12
        assert tier(engine, TierName.DISK).over_quota >= 12

    def test_pins_of_hints_resist_others_and_not_the_tenants_limit(self, start: Start) -> None:
        rules = TenantRules(TenantTerms(), {ANN: TenantTerms(Amount(8 * SLOT_BYTES))})
        engine = start(PoolTerms(tenants=rules), disk=False)
        kept = pinned_by_hint(engine)
        for number in range(60):
            engine.save(keys_of(f"flood {number}", 4), EVE)
        assert engine.pool.find(kept).blocks == 4
        assert tier(engine, TierName.HOST).evictions == 60 * 4 - 60
        more = keys_of("more", 8)
        assert engine.save(more, ANN) == {Verdict.RESERVED: 8}
        assert engine.pool.find(kept).blocks == 0
        assert engine.pool.find(more).blocks == 8
        assert tier(engine, TierName.HOST).quota_evictions == 4

    def test_pins_of_hints_do_not_resist_the_tenants_limit_on_disk(self, start: Start) -> None:
        rules = TenantRules(TenantTerms(), {ANN: TenantTerms(None, Amount(8 * SLOT_BYTES))})
        engine = start(PoolTerms(tenants=rules))
        kept, more = pinned_by_hint(engine), keys_of("more", 8)
        assert engine.pool.flush(kept, 60.0)
        disk = self.disk(engine)
        wait_until(lambda: len(disk.catalog._policy._pins) == 4)  # type: ignore[attr-defined]
        engine.save(more, ANN)
        assert engine.pool.flush(more, 60.0)
        assert [disk.contains(key) for key in (*kept, *more)] == [False] * 4 + [True] * 8
        assert tier(engine, TierName.DISK).quota_evictions == 4

    # -- expiry ----------------------------------------------------------------------------

    def test_blocks_expire_by_their_tenants_ttl(self, start: Start) -> None:
        rules = TenantRules(TenantTerms(ttl_s=1000.0), {ANN: TenantTerms()})
        engine = start(PoolTerms(tenants=rules), disk=False)
        kept, gone, pinned = keys_of("ann", 5), keys_of("bob", 5), keys_of("pinned", 5)
        engine.save(kept, ANN)
        engine.save(pinned, BOB)
        engine.save(gone, BOB)
        admin = self.admin(engine)
        admin.pin(pinned)
        now = admin.now
        admin.now = lambda: now() + 1001.0
        wait_until(lambda: engine.pool.find(gone).blocks == 0)
        assert engine.pool.find(kept).blocks == 5
        assert engine.pool.find(pinned).blocks == 5

    # -- pins ------------------------------------------------------------------------------

    def test_pinned_blocks_stay_and_unpinned_ones_go(self, start: Start) -> None:
        engine = start(PoolTerms(), blocks=32, disk=False)
        keys = keys_of("pinned", 10)
        engine.save(keys)
        self.admin(engine).pin(keys)
        for number in range(10):
            engine.save(keys_of(f"flood {number}", 20))
        assert engine.pool.find(keys).blocks == 10
        assert engine.pool.stats().tiers[0].pinned_bytes == 10 * SLOT_BYTES
        self.admin(engine).unpin(keys)
        for number in range(10):
            engine.save(keys_of(f"again {number}", 20))
        assert engine.pool.find(keys).blocks == 0
        assert engine.pool.stats().tiers[0].pinned_bytes == 0

    def test_no_more_than_the_limit_can_be_pinned(self, start: Start) -> None:
        engine = start(PoolTerms(pin_limit=0.25), blocks=40, disk=False)
        keys = keys_of("much", 20)
        engine.save(keys)
        with pytest.raises(ConfigError, match="pin_limit"):
            self.admin(engine).pin(keys)
        assert engine.pool.stats().tiers[0].pinned_bytes == 0
        self.admin(engine).pin(keys[:10])
        with pytest.raises(ConfigError, match="pin_limit"):
            self.admin(engine).pin(keys[10:11])
        self.admin(engine).pin(keys[:10])  # pinned already

    def test_pinned_blocks_are_pinned_after_a_restart(self, start: Start) -> None:
        limit = TenantRules(TenantTerms(None, Amount(20 * SLOT_BYTES)))
        engine = start(PoolTerms(tenants=limit))
        keys = keys_of("pinned", 10)
        engine.save(keys[:5], ANN)
        assert engine.pool.flush(keys[:5], 60.0)
        engine.save(keys, ANN)
        self.admin(engine).pin(keys)  # half of them perhaps not on disk yet
        assert engine.pool.flush(keys, 60.0)
        self.admin(engine).pin([])  # waits until that is noted
        engine.close()
        engine.pool.close()
        engine = start(PoolTerms(tenants=limit))
        assert tier(engine, TierName.DISK).pinned_bytes == 10 * SLOT_BYTES
        assert len(engine.recall(keys, ANN)) == 10
        assert tier(engine, TierName.HOST).pinned_bytes == 10 * SLOT_BYTES
        for number in range(5):
            flood = keys_of(f"flood {number}", 10)
            engine.save(flood, ANN)
            assert engine.pool.flush(flood, 60.0)
        disk = self.disk(engine)
        assert all(disk.contains(key) for key in keys)
        self.admin(engine).unpin(keys)
        assert tier(engine, TierName.DISK).pinned_bytes == 0

    def test_clear_takes_pinned_blocks_too(self, start: Start) -> None:
        engine = start(PoolTerms(), disk=False)
        keys = keys_of("pinned", 10)
        engine.save(keys)
        self.admin(engine).pin(keys)
        engine.pool.clear()
        assert engine.pool.find(keys).blocks == 0
        assert engine.save(keys) == {Verdict.RESERVED: 10}
        assert engine.pool.stats().tiers[0].pinned_bytes == 0

    # -- sizes -----------------------------------------------------------------------------

    def test_the_host_shrinks_and_grows(self, start: Start) -> None:
        engine = start(PoolTerms(), blocks=64, disk=False)
        admin = self.admin(engine)
        keys = keys_of("a", 40)
        engine.save(keys)
        engine.pool.touch(keys)
        engine.save(keys_of("b", 24))
        engine.pool.touch(keys)
        engine.pool.find(())
        admin.pool.resize_host(20 * SLOT_BYTES)
        wait_until(lambda: admin.pool.host_surplus() == 0)
        assert engine.pool.stats().tiers[0].capacity_bytes == 20 * SLOT_BYTES
        assert engine.pool.find(keys).blocks == 20, "what was used last stays, prefixes first"
        assert engine.save(keys_of("c", 30)) == {Verdict.RESERVED: 20, Verdict.REFUSED: 10}
        admin.pool.resize_host(64 * SLOT_BYTES)
        assert engine.save(keys_of("d", 40)) == {Verdict.RESERVED: 40}
        with pytest.raises(ConfigError, match="can grow to"):
            admin.pool.resize_host(65 * SLOT_BYTES)

    def test_the_host_waits_for_leases_when_it_shrinks(self, start: Start) -> None:
        engine = start(PoolTerms(), blocks=32, disk=False)
        keys = keys_of("leased", 20)
        engine.save(keys)
        ticket = engine.pool.acquire(keys, 60.0)
        self.admin(engine).pool.resize_host(8 * SLOT_BYTES)
        engine.check(keys, engine.wait(ticket))
        assert self.admin(engine).pool.host_surplus() == 12 * SLOT_BYTES
        engine.pool.release(ticket)
        wait_until(lambda: self.admin(engine).pool.host_surplus() == 0)

    def test_the_disk_shrinks_without_losing_what_is_used(self, start: Start) -> None:
        engine = start(PoolTerms(pin_limit=0.2), blocks=128)
        disk = self.disk(engine)
        hot, pinned = keys_of("hot", 60), keys_of("pinned", 60)
        for keys in (pinned, *(keys_of(f"cold {n}", 60) for n in range(8)), hot):
            engine.save(keys)
            assert engine.pool.flush(keys, 60.0)
        self.admin(engine).pin(pinned[:50])
        engine.pool.touch(hot)
        engine.pool.find(())
        before = disk.stats()
        disk.resize(24 * MIB)
        wait_until(lambda: disk.surplus_bytes == 0 and disk.stats().blocks < before.blocks)
        wait_until(lambda: bytes_of(self.admin(engine)) <= 24 * MIB)
        assert all(disk.contains(key) for key in hot)
        assert all(disk.contains(key) for key in pinned[:50])
        assert disk.stats().blocks > 150
        checked = dict(disk.check(hot + pinned[:50]))
        assert {str(outcome) for outcome in checked.values()} == {"Outcome.LOADED"}
        with pytest.raises(ConfigError, match="of the file system of"):
            disk.resize(1 << 60)
        with pytest.raises(ConfigError, match="pinned"):
            disk.resize(8 * MIB)
        disk.resize(64 * MIB)
        for number in range(4):
            keys = keys_of(f"more {number}", 60)
            engine.save(keys)
            assert engine.pool.flush(keys, 60.0)
        assert all(disk.contains(key) for key in hot)

    # -- write policies --------------------------------------------------------------------

    def test_back_writes_what_is_flushed_and_the_rest_at_close(self, start: Start) -> None:
        engine = start(PoolTerms("back"))
        keys, other = keys_of("a", 10), keys_of("b", 10)
        engine.save(keys)
        engine.save(other)
        assert engine.pool.stats().unwritten_bytes == 20 * SLOT_BYTES
        self.pool_of(engine.pool).drop(other[8:])
        assert engine.pool.flush(keys, 60.0)
        # Durable is a moment before it is counted.
        wait_until(lambda: tier(engine, TierName.DISK).writes == 10)
        wait_until(lambda: engine.pool.stats().unwritten_bytes == 8 * SLOT_BYTES)
        engine.close()
        engine.pool.close()
        engine = start(PoolTerms("back"))
        assert engine.pool.find(keys + other).blocks == 18

    def test_back_writes_before_it_evicts(self, start: Start) -> None:
        terms = PoolTerms("back", unwritten_marks=Watermarks(1.0, 1.0))
        engine = start(terms, blocks=32)
        chains = [keys_of(f"chain {number}", 8) for number in range(12)]
        for keys in chains:
            wait_until(lambda keys=keys: saved(engine, keys))  # type: ignore[misc]
        assert all(engine.pool.find(keys).blocks == 8 for keys in chains)

    def test_back_writes_when_too_much_is_unwritten(self, start: Start) -> None:
        terms = PoolTerms("back", unwritten_marks=Watermarks(0.5, 0.25))
        engine = start(terms, blocks=40)
        first, second = keys_of("first", 15), keys_of("second", 10)
        engine.save(first)
        engine.save(second)
        wait_until(lambda: tier(engine, TierName.DISK).writes == 15)
        disk = self.disk(engine)
        assert all(disk.contains(key) for key in first), "the least recently used first"
        assert engine.pool.stats().unwritten_bytes == 10 * SLOT_BYTES

    def test_selective_writes_on_the_second_sight(self, start: Start) -> None:
        engine = start(PoolTerms("selective"))
        once, twice = keys_of("once", 8), keys_of("twice", 8)
        for keys in (once, twice):
            engine.pool.touch(keys)
            engine.save(keys)
        engine.pool.touch(twice)
        wait_until(lambda: tier(engine, TierName.DISK).writes == 8)
        disk = self.disk(engine)
        assert all(disk.contains(key) for key in twice)
        assert not any(disk.contains(key) for key in once)
        assert engine.pool.flush(once, 60.0), "what is flushed is written"

    def test_selective_remembers_what_left_the_host(self, start: Start) -> None:
        engine = start(PoolTerms("selective"), blocks=16)
        keys = keys_of("a", 8)
        engine.pool.touch(keys)
        engine.save(keys)
        for number in range(4):
            engine.pool.touch(keys_of(f"other {number}", 8))
            engine.save(keys_of(f"other {number}", 8))
        assert engine.pool.find(keys).blocks == 0
        engine.pool.touch(keys)
        engine.save(keys)
        wait_until(lambda: tier(engine, TierName.DISK).writes == 8)

    def test_the_host_is_kept_below_its_high_mark(self, start: Start) -> None:
        engine = start(PoolTerms(host_marks=Watermarks(0.8, 0.5)), blocks=40, disk=False)
        keys = keys_of("a", 36)
        engine.save(keys)
        wait_until(lambda: engine.pool.find(keys).blocks == 20)
        engine.save(keys_of("b", 8))
        assert engine.pool.find(keys_of("b", 8)).blocks == 8
        pool = self.pool_of(engine.pool)
        with pool._changed:
            assert not pool._evictor.trim(40), "until it is above that again"
        assert engine.pool.find(keys).blocks == 20


def tier(engine: Engine, name: TierName) -> TierStats:
    return next(tier for tier in engine.pool.stats().tiers if tier.name == name)


def pinned_by_hint(engine: Engine) -> list:  # type: ignore[type-arg]
    """Four blocks of ANN, saved and pinned for a minute by a hint, after eight that came true."""
    said, keys = keys_of("said", 1), keys_of("kept", 4)
    for _ in range(9):
        engine.pool.touch(said, hint=Hint(returns=True), tenant=ANN)
    engine.pool.touch(keys, hint=Hint(returns=True, pin_s=60.0), tenant=ANN)
    engine.save(keys, ANN)
    assert engine.pool.stats().hints_believed > 0
    return keys


def held(admin: PoolAdmin, tenant: Tenant) -> int:
    """Bytes of a tenant in the host."""
    return sum(use.used_bytes for use in admin.pool.host_tenants() if use.tenant == tenant)


def saved(engine: Engine, keys: list) -> bool:  # type: ignore[type-arg]
    """Whether all of ``keys`` are in the pool, after another attempt to save them."""
    engine.save(keys)
    return engine.pool.find(keys).blocks == len(keys)


def bytes_of(admin: PoolAdmin) -> int:
    """What the files of the disk tier take."""
    assert admin.disk is not None
    paths = list(admin.disk.path.iterdir())
    return sum(path.stat().st_blocks * 512 for path in paths)


__all__ = ["Pool", "TermsContract"]
