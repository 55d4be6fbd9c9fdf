"""What is offloaded while the pool service is lost and returns with another arena: the planner and
the scheduler side without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool.inside import blocks_of, life_of

from engines.vllm.connector.test_offload import BLOCK, Bench
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing import wait_until

MIB = 1 << 20


class Node:
    """A service that can be replaced, and its client."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self._config = PoolConfig(MIB, DiskConfig(folder / "disk", 64 * MIB))
        self._path = folder / "pool.sock"
        self.service = ServiceThread(self._config, self._path)
        self.client = ServiceClient(self._path, 60.0)

    def begin_anew(self) -> None:
        """Ends the service and starts another one."""
        before = life_of(self.client)
        self.service.close()
        self.service = ServiceThread(self._config, self._path)
        wait_until(lambda: life_of(self.client) not in (None, before))

    @property
    def leases(self) -> int:
        return self.service.pool.stats().leases

    def close(self) -> None:
        self.client.close()
        self.service.close()


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"))
    yield node
    node.close()


def looked_up(bench: Bench) -> None:
    """Another request looks up blocks, as in any step: the client switches to the current
    service."""
    bench.side.admit(other := bench.request("passing", 40, 5000))
    bench.side.match(other, 0)
    bench.end(other)


def departures(bench: Bench, act: Callable[[], bool]) -> int:
    """Blocks that leave in a step."""
    assert act()
    return 0 if bench.orders is None else sum(len(d.block_ids) for d in bench.orders.departures)


def test_of_what_another_service_holds_nothing_is_mixed_in(node: Node) -> None:
    """Offloaded blocks stay in place; later ones stay on the device. Other sequences start
    fresh."""
    bench = Bench(node.client, 100)
    request = bench.begun("r", 400, 0)
    assert departures(bench, lambda: bench.decode(request)) == 20
    state = bench.side.state_of("r")
    assert state is not None
    assert node.client.flush(state.keys(25), 10.0)
    node.begin_anew()
    looked_up(bench)
    for _ in range(10 * BLOCK):
        assert departures(bench, lambda: bench.decode(request)) == 0
        assert bench.orders is not None
        assert list(bench.orders.rows.values()) == ["r"]
    ids = bench.manager.get_block_ids("r")[0]
    assert ids.count(0) == 20
    assert node.leases == 0
    other = bench.begun("other", 400, 1000)
    assert departures(bench, lambda: bench.decode(other)) == 20
    assert node.leases == 20
    bench.end(request)
    bench.end(other)
    assert bench.free == 99
    wait_until(lambda: node.leases == 0)


def test_what_was_leased_of_a_lost_service_does_not_leave(node: Node) -> None:
    """It had no room for slots before; then its blocks are leased anew, from the disk."""
    bench = Bench(node.client, 60)
    request = bench.begun("r", 400, 0)
    twin = bench.begun("twin", 400, 0)  # so that leaving frees nothing
    hog = bench.manager.block_pool.get_new_blocks(bench.free - 1)
    assert departures(bench, lambda: bench.decode(request)) == 0
    assert node.leases == 20
    before = bench.pool.arena_handle()
    assert node.client.flush(bench.side.state_of("r").keys(25), 10.0)  # type: ignore[union-attr]
    node.begin_anew()
    looked_up(bench)
    assert node.client.arena_handle() != before
    bench.manager.block_pool.free_blocks(hog)
    bench.end(twin)
    left = 0
    for _ in range(200):
        left += departures(bench, lambda: bench.decode(request))
        if left:
            break
    assert left == 20
    assert bench.orders is not None
    held = {block.offset for block in blocks_of(node.service.pool) if block.leases}
    assert set(bench.orders.departures[0].offsets) == held
    bench.end(request)
    wait_until(lambda: node.leases == 0)


@pytest.mark.parametrize("tokens", [200, 400])
def test_a_claim_on_a_lost_service_is_no_hit(node: Node, tokens: int) -> None:
    """The claim waited for room on the device, and its slots now contain other blocks: for a prefix
    that is loaded whole, and one whose middle stays in the pool."""
    bench = Bench(node.client, 60)
    bench.end(bench.begun("before", tokens, 0))
    assert bench.manager.reset_prefix_cache()
    hog = bench.manager.block_pool.get_new_blocks(bench.free - 2)
    request = bench.request("r", tokens)
    assert not bench.restore(request)
    bench.orders_of({})
    node.begin_anew()
    looked_up(bench)
    bench.manager.block_pool.free_blocks(hog)
    assert bench.side.match(request, 0) == (0, False)
    assert bench.planner.left_in_pool("r") is None
    request.num_computed_tokens = 0
    bench.prefill(request)
    assert bench.loads == []
    bench.end(request)
    assert bench.free == 59
