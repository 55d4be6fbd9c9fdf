"""Three hosts, with Mooncake's master on the first."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from kvrecall.lab.masters import Master
from tests.remote.network import MASTER, Network, why_not

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
