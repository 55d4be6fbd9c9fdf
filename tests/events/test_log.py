"""A router's view of a pool, through the log, the wire format and the reader."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.events.holdings import Holdings
from kvrecall.events.publisher import PoolEvents
from kvrecall.events.subscriber import BatchOutcome, EventReader
from kvrecall.events.wire import encode, short_hash
from kvrecall.pool import Pool
from kvrecall.testing.blocks import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine

OTHER = Namespace.of({"a": "other"})
SPACES = (NAMESPACE, OTHER)
CHAINS = [chain(NAMESPACE, 8, name) for name in "abcdef"]
CHAINS += [chain(OTHER, 8, name) for name in "uv"]
TIERS = (TierName.HOST, TierName.DISK)
OTHERS = ["clear", "read", "repeat", "toggle"]
ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 7), st.integers(1, 8)),
    st.tuples(st.just("recall"), st.integers(0, 7), st.integers(1, 8)),
    st.tuples(st.just("drop"), st.integers(0, 7), st.integers(0, 7)),
    st.tuples(st.sampled_from(OTHERS), st.integers(0, 1), st.just(0)),
)


class Router:
    """Follows a pool of which some namespaces are live: an engine can recall their blocks."""

    def __init__(self, pool: Pool, most: int) -> None:
        self.live: dict[bytes, int] = {}
        self.events = PoolEvents(pool, lambda: self.live, most)
        self._reader = EventReader(Holdings())

    def read(self, repeat: bool = False) -> None:
        batch = encode(self.events.take(repeat))
        assert self._reader.take(self._reader.last + 1, batch) is BatchOutcome.APPLIED

    def known(self) -> set[tuple[TierName, int]]:
        self.read()
        while not self.events.is_complete:
            self.read()
        return {(tier, one) for tier in TIERS for one in self._reader.holdings.hashes(tier)}


def short(key: BlockKey) -> int:
    return short_hash(key[NAMESPACE_BYTES:])


@given(st.lists(ACTIONS, max_size=30), st.integers(1, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_router_knows_what_an_engine_can_recall(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, int, int]],
    most: int,
    with_disk: bool,
) -> None:
    """Whatever happens in between: logs that overflow, namespaces that come and go."""
    disk = DiskConfig(tmp_path_factory.mktemp("pool"), 64 << 20) if with_disk else None
    with Pool.open(PoolConfig(16 * SLOT_BYTES, disk)) as pool:
        for space in SPACES:
            pool.register(space, BLOCK_BYTES)
        engine, router = Engine(pool), Router(pool, most)
        for action, which, length in actions:
            keys = CHAINS[which]
            match action:
                case "save":
                    engine.save(keys[:length])
                case "recall":
                    engine.recall(keys[:length])
                case "drop":
                    pool.admin.drop([keys[length]])
                case "clear":
                    pool.clear()
                case "toggle" if SPACES[which].digest in router.live:
                    del router.live[SPACES[which].digest]
                case "toggle":
                    router.live[SPACES[which].digest] = which
                case _:
                    router.read(repeat=action == "repeat")
        engine.close()
        if with_disk:
            wait_until(lambda: pool.stats().queued_writes == 0)
            pool.flush([key for each in CHAINS for key in each], 10.0)
        there = {
            (block.tier, short(block.key))
            for block in pool.admin.blocks()
            if block.key[:NAMESPACE_BYTES] in router.live
        }
        assert router.known() == there
