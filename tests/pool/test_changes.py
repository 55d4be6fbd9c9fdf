"""What a watcher of a pool is told, and what a reader of its log knows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.block import BlockKey, Namespace, TierName, tenant_of
from kvrecall.config import Amount, DiskConfig, PoolConfig, PoolTerms, TenantRules, TenantTerms
from kvrecall.pool import Pool
from kvrecall.pool.changes import Cause, ChangeLog, Removed, Restart, Stored
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine

MIB = 1 << 20
OTHER = Namespace.of({"a": "other"})
Held = dict[tuple[TierName, BlockKey], BlockKey | None]


class Reader:
    """Applies the changes of a log, as a router does."""

    def __init__(self, pool: Pool, most: int) -> None:
        self.log = ChangeLog(pool.sweep, most)
        pool.watch(self.log)
        self.held: Held = {}
        self.repeats = False  # all was told once more
        self.causes: list[tuple[TierName, Cause]] = []

    def read(self) -> None:
        for change in self.log.take():
            match change:
                case Restart.RESTART:
                    self.held.clear()
                case Stored(tier, key, parent):
                    assert self.repeats or (tier, key) not in self.held, "told twice"
                    self.held[tier, key] = parent
                case Removed(tier, key, cause):
                    self.held.pop((tier, key), None)
                    self.causes.append((tier, cause))

    def read_all(self) -> Held:
        self.read()
        while not self.log.is_complete:
            self.read()
        return self.held


def held(pool: Pool) -> Held:
    return {(block.tier, block.key): block.parent for block in pool.admin.blocks()}


def open_pool(path: Path | None, host_blocks: int = 16, terms: PoolTerms | None = None) -> Pool:
    disk = None if path is None else DiskConfig(path, 64 * MIB)
    config = PoolConfig(host_blocks * SLOT_BYTES, disk, terms=terms or PoolTerms())
    pool = Pool.open(config)
    pool.register(NAMESPACE, BLOCK_BYTES)
    pool.register(OTHER, BLOCK_BYTES)
    return pool


CHAINS = [chain(NAMESPACE, 8, name) for name in "abcdef"]
OF_OTHER = [chain(OTHER, 8, name) for name in "ab"]
EVERY = CHAINS + OF_OTHER
Action = tuple[str, int, int]


def actions(*more: str) -> st.SearchStrategy[list[Action]]:
    """Of an engine and an operator, and ``more`` of the test's own."""
    others = st.sampled_from(["clear", "read", "repeat", *more])
    which = st.integers(0, 7)
    return st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["save", "recall"]), which, st.integers(1, 8)),
            st.tuples(st.just("drop"), which, st.integers(0, 7)),
            st.tuples(others, st.integers(0, 1), st.just(0)),
        ),
        max_size=30,
    )


def play(pool: Pool, story: list[Action], act: Callable[[str, int], None]) -> None:
    """Lets an engine and an operator act, and waits until the disk has what was saved. ``act``:
    does the other actions."""
    engine = Engine(pool)
    for action, which, length in story:
        match action:
            case "save":
                engine.save(EVERY[which][:length])
            case "recall":
                engine.recall(EVERY[which][:length])
            case "drop":
                pool.admin.drop([EVERY[which][length]])
            case "clear":
                pool.clear()
            case _:
                act(action, which)
    engine.close()
    wait_until(lambda: pool.stats().queued_writes == 0)
    pool.flush([key for each in EVERY for key in each], 10.0)


@given(actions("flush"), st.integers(1, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_reader_knows_what_the_pool_holds(
    tmp_path_factory: pytest.TempPathFactory, story: list[Action], most: int, with_disk: bool
) -> None:
    path = tmp_path_factory.mktemp("pool") if with_disk else None
    with open_pool(path) as pool:
        reader = Reader(pool, most)

        def act(action: str, which: int) -> None:
            match action:
                case "flush":
                    pool.flush([key for each in EVERY for key in each], 10.0)
                case "read":
                    reader.read()
                case "repeat":
                    reader.repeats = True
                    reader.log.repeat()

        play(pool, story, act)
        assert reader.read_all() == held(pool)


def test_what_is_repeated_of_a_namespace_is_its_blocks_alone(tmp_path: Path) -> None:
    """Also while all is reported for the first time, and several at once; a sweep that has not
    begun is not repeated."""
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        ours, theirs = CHAINS[0], OF_OTHER[0]
        engine.save(ours)
        engine.save(theirs)
        assert pool.flush(ours + theirs, 10.0)
        log = ChangeLog(pool.sweep)

        def told() -> list[BlockKey]:
            found = list(log.take())
            while not log.is_complete:
                found += log.take()
            return sorted(one.key for one in found if isinstance(one, Stored))

        log.repeat({OTHER.digest})
        assert told() == sorted(2 * (ours + theirs)), "in the host and on disk, once each"
        log.repeat({OTHER.digest})
        assert told() == sorted(2 * theirs)
        log.repeat({OTHER.digest})
        log.repeat({NAMESPACE.digest})
        assert told() == sorted(2 * (ours + theirs))
        log.repeat()
        begun = [one.key for one in log.take() if isinstance(one, Stored)]
        assert begun
        assert not log.is_complete
        log.repeat({OTHER.digest})
        assert sorted(begun + told()) == sorted(2 * ours + 4 * theirs)


def test_each_removal_has_its_cause() -> None:
    rules = TenantRules(TenantTerms(), {tenant_of("ann"): TenantTerms(host=Amount(2 * SLOT_BYTES))})
    with open_pool(None, 8, PoolTerms(tenants=rules)) as pool, closing(Engine(pool)) as engine:
        reader = Reader(pool, 1000)
        steps = [
            ([lambda: engine.save(CHAINS[0]), lambda: engine.save(CHAINS[1][:2])], Cause.CAPACITY),
            ([lambda: engine.save(CHAINS[2][:2], tenant_of("ann"))], Cause.CAPACITY),
            ([lambda: engine.save(CHAINS[3][:2], tenant_of("ann"))], Cause.QUOTA),
            ([lambda: pool.admin.drop(CHAINS[3][:1])], Cause.DROPPED),
            ([pool.clear], Cause.CLEARED),
        ]
        for actions, cause in steps:
            for act in actions:
                act()
            assert reader.read_all() == held(pool)
            assert set(reader.causes) == {(TierName.HOST, cause)}
            reader.causes.clear()


def test_a_log_that_is_not_read_is_bounded_and_says_so() -> None:
    with open_pool(None, 64) as pool, closing(Engine(pool)) as engine:
        reader = Reader(pool, 10)
        for turn in (1, 2):
            pool.clear()
            for keys in CHAINS:
                engine.save(keys)
            if turn == 1:
                assert reader.log.take()[0] is Restart.RESTART
        assert reader.log.restarts == 1
        assert reader.read_all() == held(pool)
        assert len(reader.held) == 48


def test_a_reopened_folder_is_reported(tmp_path: Path) -> None:
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        engine.save(CHAINS[0])
        assert pool.flush(CHAINS[0], 60.0)
    with open_pool(tmp_path) as pool:
        reader = Reader(pool, 1000)
        wait_until(lambda: reader.read_all() == held(pool) and len(reader.held) == 8)
        assert {tier for tier, _ in reader.held} == {TierName.DISK}
