"""Three hosts, with Mooncake's master on the first; and pools over one store in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores import SHARED, MemoryStore

from kvrecall.pool.pool import Pool
from kvrecall.processes.service import Master
from pool.remote.network import MASTER, Network, why_not
from pool.remote.pools import NAMESPACE, NBYTES, OpenPool, settings

PORT = 50051
why_no_hosts = functools.cache(why_not)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module")
def master(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    log = tmp_path_factory.mktemp("master") / "master.log"
    master = Master(log, network.address(MASTER), PORT, network.prefix(MASTER))
    master.start(client_ttl_s=4)
    yield master
    master.kill()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    SHARED[request.node.name] = MemoryStore()
    yield SHARED[request.node.name]
    SHARED.pop(request.node.name).gate.set()


@pytest.fixture
def open_pool(request: pytest.FixtureRequest, store: MemoryStore) -> Iterator[OpenPool]:
    pools: list[Pool] = []

    def open_one(disk: Path | None = None, **more: object) -> Pool:
        pool = Pool.open(settings(request.node.name, disk, **more))
        pools.append(pool)
        pool.register(NAMESPACE, NBYTES)
        return pool

    yield open_one
    store.gate.set()
    for pool in pools:
        pool.close()
