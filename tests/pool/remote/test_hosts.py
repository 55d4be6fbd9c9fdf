"""Pools on two hosts, Mooncake's master on a third: cut links, and a host that dies."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.processes.service import Master
from pool.remote.mooncake import needs_mooncake
from pool.remote.network import FIRST, SECOND, Network, PoolHost

pytestmark = [needs_mooncake, pytest.mark.timeout(300), pytest.mark.long]


def open_host(network: Network, master: Master, host: int, folder: Path) -> PoolHost:
    remote = {
        "kind": "mooncake",
        **master.options("64MB"),
        "local_hostname": network.address(host),
        "allow_plaintext": True,
    }
    settings = {"host_size": "16MiB", "remote": remote}
    return PoolHost(network, host, settings, folder / f"host{host}.log")


@pytest.fixture
def hosts(network: Network, master: Master, tmp_path: Path) -> Iterator[tuple[PoolHost, PoolHost]]:
    first, second = (open_host(network, master, host, tmp_path) for host in (FIRST, SECOND))
    yield first, second
    for host in (FIRST, SECOND):
        network.mend(host)
    first.close()
    second.close()


def recalled(host: PoolHost, chain: str, count: int, **more: float) -> list[str]:
    """Tiers of what a host recalled; every byte was right."""
    reply = host.do("recall", chain=chain, count=count, **more)
    assert reply["right"]
    return list(reply["tiers"])


def until_shared(one: PoolHost, other: PoolHost, chain: str) -> None:
    """One host saves chains of 20 until the other recalls one from the store. The first ones may
    be lost: the master gives out memory of a host that is away until it has noticed."""
    for number in itertools.count():
        name = f"{chain}{number}"
        one.do("save", chain=name, count=20, deadline_s=10.0)
        if recalled(other, name, 20, deadline_s=5.0) == ["remote"] * 20:
            return
        time.sleep(0.5)


def test_a_link_is_cut_and_comes_back(network: Network, hosts: tuple[PoolHost, PoolHost]) -> None:
    first, second = hosts
    until_shared(first, second, "a")
    first.do("save", chain="b", count=20)
    assert second.do("save", chain="own", count=20)["stored"]
    network.cut(SECOND)
    reply = second.do("recall", chain="b", count=20, deadline_s=3.0)
    assert (reply["tiers"], reply["right"]) == ([], True)
    assert second.do("recall", chain="own", count=20, deadline_s=3.0)["tiers"] == ["host"] * 20
    assert second.do("save", chain="c", count=20, deadline_s=1.0) == {"stored": False}
    assert second.do("recall", chain="c", count=20)["tiers"] == ["host"] * 20
    network.mend(SECOND)
    until_shared(first, second, "d")
    until_shared(second, first, "e")
    recalled(second, "b", 20)  # what lay in the second host's memory may be lost, and is not wrong


def test_a_host_that_dies_takes_only_its_blocks_along(
    network: Network, master: Master, hosts: tuple[PoolHost, PoolHost], tmp_path: Path
) -> None:
    first, second = hosts
    assert first.do("save", chain="x", count=30)["stored"]
    assert recalled(second, "x", 5)  # it holds a connection
    network.cut(FIRST)
    first.kill()
    reply = second.do("recall", chain="x", count=30, deadline_s=3.0)
    assert reply["right"]
    assert second.do("save", chain="y", count=20, deadline_s=60.0)["stored"]
    recalled(second, "x", 30, deadline_s=3.0)
    assert second.do("counts")["corrupt"] == 0
    network.mend(FIRST)
    again = open_host(network, master, FIRST, tmp_path)
    until_shared(second, again, "z")
    again.close()
