"""A Hypothesis state machine: the pool against a plain dictionary, on real memory and files."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvrecall.block import SHARED, BlockKey, tenant_of
from kvrecall.config import Amount, DiskConfig, PoolConfig, PoolTerms, TenantRules, TenantTerms
from kvrecall.errors import ConfigError
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.base import PoolClient, Recall, RecallState, Verdict
from kvrecall.pool.pool import Pool
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine

_SIZES = {"small": 5_000, "large": 70_000}
_LENGTH = 12
CHAINS = st.tuples(st.sampled_from(sorted(_SIZES)), st.sampled_from("abc"), st.integers(1, _LENGTH))
_HOST_BYTES = 1 << 20  # room for about 14 large blocks: evicts all the time
_DISK_BYTES = 32 << 20  # room for all there are: never evicts
_TENANTS = {"a": tenant_of("a"), "b": tenant_of("b"), "c": SHARED}  # by chain
_QUOTA = TenantRules(TenantTerms(host=Amount(share=0.6)))


class PoolMachine(RuleBasedStateMachine):
    """The model knows which keys were committed since the last ``clear``, which of them are
    durable, which are pinned, which slots are reserved and which recalls are open. Bytes follow
    from keys, and so does the tenant."""

    terms = PoolTerms(tenants=_QUOTA)
    keeps_cleared = False  # a shared store does, for other hosts; a pool may find them there again

    tickets: Bundle[int] = Bundle("tickets")
    reserved: Bundle[tuple[str, tuple[BlockKey, ...]]] = Bundle("reserved")

    def open_pool(self, folder: Path) -> PoolClient:
        """Override to test another pool."""
        config = PoolConfig(_HOST_BYTES, DiskConfig(folder, _DISK_BYTES), terms=self.terms)
        return Pool.open(config)

    def admin(self) -> PoolAdmin:
        """Override for a pool that is a client of another."""
        assert isinstance(self.pool, Pool)
        return self.pool.admin

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvrecall-machine-"))
        self.committed: set[BlockKey] = set()
        self.kept: set[BlockKey] = set()
        self.durable: set[BlockKey] = set()
        self.pinned: set[BlockKey] = set()
        self.filling: dict[BlockKey, int] = {}
        self.open: dict[int, tuple[str, list[BlockKey], Recall | None]] = {}
        self.start()

    def start(self) -> None:
        self.pool = self.open_pool(self.folder)
        self.engines = {}
        for name, size in _SIZES.items():
            self.pool.register(namespace(name), size)
            self.engines[name] = Engine(self.pool, size)

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.pool.close()

    def may_have(self, key: BlockKey) -> bool:
        return key in self.committed or key in self.kept

    @staticmethod
    def keys(of: tuple[str, str, int]) -> list[BlockKey]:
        size, name, length = of
        return chain(namespace(size), length, name)

    @rule(of=CHAINS)
    def save(self, of: tuple[str, str, int]) -> None:
        keys = self.keys(of)
        known = {key for key in keys if key in self.filling or self.may_have(key)}
        answers = self.pool.reserve(keys, None, _TENANTS[of[1]])
        got = []
        for key, answer in zip(keys, answers, strict=True):
            if answer.verdict is Verdict.PRESENT:
                assert key in known
            elif answer.verdict is Verdict.RESERVED:
                assert key not in self.filling
                self.engines[of[0]].fill(key, answer.offset)
                got.append(key)
        self.pool.commit(got)
        self.committed.update(got)

    @rule(of=CHAINS, target=reserved)
    def reserve(self, of: tuple[str, str, int]) -> tuple[str, tuple[BlockKey, ...]]:
        keys = self.keys(of)
        got = []
        answers = self.pool.reserve(keys, None, _TENANTS[of[1]])
        for key, answer in zip(keys, answers, strict=True):
            if answer.verdict is Verdict.RESERVED:
                self.filling[key] = answer.offset
                got.append(key)
        return of[0], tuple(got)

    @rule(what=consumes(reserved), fill=st.booleans())
    def end_reservation(self, what: tuple[str, tuple[BlockKey, ...]], fill: bool) -> None:
        size, keys = what
        keys = tuple(key for key in keys if key in self.filling)
        for key in keys:
            self.engines[size].fill(key, self.filling.pop(key))
        if fill:
            self.pool.commit(keys)
            self.committed.update(keys)
        else:
            self.pool.abandon(keys)

    @rule(of=CHAINS, target=tickets)
    def acquire(self, of: tuple[str, str, int]) -> int:
        keys = self.keys(of)
        ticket = self.pool.acquire(keys, 20.0, None, _TENANTS[of[1]])
        self.open[ticket] = of[0], keys, None
        return ticket

    @rule(ticket=tickets)
    def look(self, ticket: int) -> None:
        if ticket not in self.open:
            return
        size, keys, before = self.open[ticket]
        recall = self.pool.poll(ticket)
        if before is not None:
            assert recall == before
        if recall.state is RecallState.READY:
            self.engines[size].check(keys, recall)
            self.open[ticket] = size, keys, recall

    @rule(ticket=consumes(tickets), early=st.booleans())
    def release(self, ticket: int, early: bool) -> None:
        if ticket not in self.open:
            return
        size, keys, _ = self.open.pop(ticket)
        if not early:
            recall = self.engines[size].wait(ticket)
            self.engines[size].check(keys, recall)
        self.pool.release(ticket)

    @rule(of=CHAINS)
    def find(self, of: tuple[str, str, int]) -> None:
        keys = self.keys(of)
        found = self.pool.find(keys).blocks
        assert all(map(self.may_have, keys[:found]))
        if found < len(keys):
            assert keys[found] not in self.durable

    @rule(of=CHAINS)
    def touch(self, of: tuple[str, str, int]) -> None:
        self.pool.touch(self.keys(of))

    @rule(of=CHAINS)
    def flush(self, of: tuple[str, str, int]) -> None:
        keys = self.keys(of)
        if self.pool.flush(keys, 20.0):
            assert all(map(self.may_have, keys))
            self.durable.update(keys)

    @rule(of=CHAINS)
    def pin(self, of: tuple[str, str, int]) -> None:
        present = [key for key in self.keys(of) if self.pool.find([key]).blocks]
        try:
            self.admin().pin(present)
        except ConfigError:
            return  # too many: none is
        self.pinned.update(key for key in present if self.pool.find([key]).blocks)

    @rule(of=CHAINS)
    def unpin(self, of: tuple[str, str, int]) -> None:
        self.admin().unpin(self.keys(of))
        self.pinned.difference_update(self.keys(of))

    @rule(share=st.sampled_from((0.5, 0.75, 1.0)))
    def resize(self, share: float) -> None:
        admin = self.admin()
        assert admin.disk is not None
        for size, total in (
            (admin.pool.resize_host, _HOST_BYTES),
            (admin.disk.resize, _DISK_BYTES),
        ):
            with contextlib.suppress(ConfigError):  # too much is pinned
                size(int(total * share))

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.durable.clear()
        self.pinned.clear()
        leased = {
            key
            for _, keys, recall in self.open.values()
            for key in (keys if recall is None else keys[: len(recall.offsets)])
        }
        if self.keeps_cleared:
            self.kept |= self.committed
        self.committed &= leased

    @precondition(lambda self: len(self.committed) > 10)
    @rule()
    def restart(self) -> None:
        self.stop()
        self.open.clear()
        self.filling.clear()
        self.start()
        for key in self.durable:
            assert self.pool.find([key]).blocks == 1
        self.pinned &= self.durable

    @invariant()
    def pinned_blocks_are_there(self) -> None:
        if hasattr(self, "pool"):
            assert all(self.pool.find([key]).blocks == 1 for key in self.pinned)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "pool"):
            stats = self.pool.stats()
            assert stats.reserved == len(self.filling)
            assert stats.tiers[0].used_bytes <= _HOST_BYTES
            assert all(tier.pinned_bytes <= tier.capacity_bytes / 2 for tier in stats.tiers)
            assert all(tier.corrupt == 0 and tier.errors == 0 for tier in stats.tiers)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for ticket in self.open:
            self.pool.release(ticket)
        self.pool.abandon(list(self.filling))
        self.pool.clear()
        self.pool.clear()
        assert self.pool.stats().leases == 0
        wait_until(lambda: self.pool.stats().tiers[0].used_bytes == 0)  # no slot leaks
        self.stop()
        shutil.rmtree(self.folder)


__all__ = ["CHAINS", "PoolMachine"]
