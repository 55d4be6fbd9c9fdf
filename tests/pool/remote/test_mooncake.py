"""The Mooncake store with a real master and real clients."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.commands import ran

from kvrecall.block import BlockKey
from kvrecall.config import PoolConfig, RecallSettings, RemoteConfig
from kvrecall.errors import ConfigError, ExitStatus, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.backends import make_store
from kvrecall.pool.remote.mooncake.client_process import ClientRequest
from kvrecall.pool.remote.mooncake.master import MasterFlags, check_master
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings, built_protocols, package_folder
from kvrecall.pool.remote.mooncake.store import ClientLost, MooncakeStore
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object
from kvrecall.pool.remote.tier import RemoteTier, name_of
from kvrecall.pool.tier import Outcome, Tier
from kvrecall.processes.ports import free_port
from kvrecall.processes.service import Master
from kvrecall.testing import chain, wait_until
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench
from pool.inside import below, retry_writes
from pool.remote.mooncake import needs_mooncake
from pool.remote.pools import find, recall, save

ARENA_BYTES = 16 << 20
_numbers = itertools.count()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("mooncake") / "master.log")
    master.start()
    yield master
    master.kill()


class Node:
    """One host: an arena and a client of Mooncake."""

    def __init__(self, master: Master, lends: int | str = 64 << 20) -> None:
        self.arena = Arena.create(ARENA_BYTES)
        self.mooncake = MooncakeStore(MooncakeSettings.of(master.options(lends)))
        self.store = StagedStore(self.mooncake)

    def close(self) -> None:
        self.store.close()
        self.arena.close()


class Apart:
    """A node's store in which the names of each test are its own; closing it leaves the node."""

    def __init__(self, node: Node, prefix: str) -> None:
        self._store = node.store
        self._prefix = prefix

    exposed = ""

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._store.exists(self._own(names))

    def put(self, objects: Sequence[Object]) -> list[bool]:
        return self._store.put([Object(self._prefix + p.name, p.parts) for p in objects])

    def get(self, objects: Sequence[Object]) -> list[bool]:
        return self._store.get([Object(self._prefix + p.name, p.parts) for p in objects])

    def remove(self, names: Sequence[str]) -> None:
        self._store.remove(self._own(names))

    def close(self) -> None:
        pass

    def _own(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]


@pytest.fixture(scope="module")
def nodes(master: Master) -> Iterator[list[Node]]:
    nodes = [Node(master), Node(master)]
    yield nodes
    for node in nodes:
        node.close()


def tier_of(node: Node, prefix: str) -> RemoteTier:
    tier = RemoteTier(Apart(node, prefix), RemoteConfig("mooncake", call_deadline_s=60.0))
    tier.register(NAMESPACE, BLOCK_BYTES)
    return tier


def ask(tier: Tier, keys: list[BlockKey]) -> list[bool]:
    wait_until(lambda: tier.ask(keys))
    return [tier.contains(key) for key in keys]


CONFINED = """
import socket, sys
from kvrecall.pool.remote.mooncake import client_process
listening = socket.create_server(("0.0.0.0", 0))
port = listening.getsockname()[1]
clients = [socket.create_connection((address, port)) for address in sys.argv[1:]]
accepted = [listening.accept()[0] for _ in clients]
client_process._confine("lo")
for client in clients:
    client.settimeout(0)
    try:
        print("ended" if client.recv(1) == b"" else "")
    except BlockingIOError:
        print("open")
"""


@needs_mooncake
def test_a_client_that_joins_ends_connections_of_other_hosts_only() -> None:
    """One of this host may be in use already: the master tells others of a client that is still
    being set up, and Mooncake fails transfers on a connection that ends (-800)."""
    own = [
        one.address
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and name != "lo"
    ]
    command = [sys.executable, "-c", CONFINED, "127.0.0.1", *own[:1]]
    told = ran(*command, check=True).stdout.split()
    assert told == ["open", "ended"][: len(told) or 1]


@needs_mooncake
def test_one_node_gets_what_another_put_and_what_is_not_the_block_goes(nodes: list[Node]) -> None:
    prefix = f"{next(_numbers)}."
    tiers = [tier_of(node, prefix) for node in nodes]
    benches = [Bench(t, memory=n.arena.memory) for t, n in zip(tiers, nodes, strict=True)]
    keys = chain(NAMESPACE, 60)
    benches[0].put(keys[:50])
    assert ask(tiers[1], keys) == [True] * 50 + [False] * 10
    assert benches[1].get(keys[:50]) == [Outcome.LOADED] * 50
    assert benches[1].holds(keys[:50])
    store = Apart(nodes[0], prefix)
    tiers[0].drop(keys[:1])
    wait_until(lambda: not store.exists([name_of(keys[0])])[0])
    parts = (memoryview(bytearray(64)), nodes[0].arena.view(0, BLOCK_BYTES))
    assert store.put([Object(name_of(keys[0]), parts)]) == [True]
    assert benches[1].get(keys[:2]) == [Outcome.CORRUPT, Outcome.LOADED]
    for tier in tiers:
        tier.close()


@needs_mooncake
def test_more_than_fits_is_shed_and_evicted_blocks_are_misses(nodes: list[Node]) -> None:
    """Two segments of 64 MiB take 300 MiB in turn: puts may be shed, gets are right or misses."""
    prefix = f"{next(_numbers)}."
    tier = RemoteTier(Apart(nodes[0], prefix), RemoteConfig("mooncake"))
    tier.register(NAMESPACE, 1 << 20)
    bench = Bench(tier, slots=8, block_bytes=1 << 20, memory=nodes[0].arena.memory)
    keys = chain(NAMESPACE, 300, "large")
    for start in range(0, 300, 8):
        bench.submit_put(keys[start : start + 8])
        wait_until(lambda: tier.queued() == (0, 0))
        tier.poll()
    seen: set[Outcome] = set()
    for key in keys:
        [outcome] = bench.get([key])
        seen.add(outcome)
        assert outcome is Outcome.MISS or bench.holds([key])
    assert seen == {Outcome.MISS, Outcome.LOADED}
    tier.close()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path / "master.log")
    yield master
    master.kill()


@needs_mooncake
def test_a_store_without_room_says_what_to_do_once(
    lone: Master, caplog: pytest.LogCaptureFixture
) -> None:
    lone.start()
    node = Node(lone, lends=0)
    data = node.arena.memory[: 64 << 10]
    try:
        for number in range(2):
            names = [f"block.{number}.{n}" for n in range(3)]
            assert node.store.put([Object(name, (data,)) for name in names]) == [False] * 3
        [said] = [text for text in caplog.messages if "did not move" in text]
        assert "did not move 3 of 3 blocks: no room" in said
        assert "raise global_segment_size" in said
    finally:
        del data
        node.close()


def pool_of(master: Master, folder: Path) -> Pool:
    file = folder / "mooncake.json"
    own = master.options("64MB")
    consent = {"allow_plaintext": own.pop("allow_plaintext")}
    file.write_text(json.dumps(own))
    remote = {"kind": "mooncake", "config": str(file), **consent}
    settings = RecallSettings.from_mapping({"host_size": "8MiB", "remote": remote})
    pool = Pool.open(settings.pool)
    pool.register(NAMESPACE, BLOCK_BYTES)
    return pool


def remote_blocks(pool: Pool, keys: list[BlockKey]) -> int:
    found = find(pool, keys)
    return len([tier for tier in found.tiers if tier == "remote"])


@needs_mooncake
def test_pools_live_through_a_master_that_is_late_dies_and_comes_back_empty(
    lone: Master, tmp_path: Path
) -> None:
    keys = chain(NAMESPACE, 20)
    first, second = pool_of(lone, tmp_path), pool_of(lone, tmp_path)
    try:
        assert find(first, keys).blocks == 0, "no master yet"
        lone.start()
        wait_until(lambda: not second.find(keys).pending and below(second)._is_up())
        wait_until(lambda: below(first)._is_up())
        save_when_there(first, keys)
        wait_until(lambda: remote_blocks(second, keys) == 20)
        assert recall(second, keys[:10]) == ("remote",) * 10
        lone.kill()
        assert recall(first, keys) == ("host",) * 20
        assert len(recall(second, keys)) in range(10, 21)  # the clients' memory is still there
        fresh = chain(NAMESPACE, 10, "fresh")
        first.reserve(fresh)
        first.commit(fresh)
        lone.start()
        other = chain(NAMESPACE, 20, "other")
        wait_until(lambda: not second.find(other).pending and below(second)._is_up())
        save_when_there(first, other)
        wait_until(lambda: remote_blocks(second, other) == 20)
        assert recall(second, other) == ("remote",) * 20
    finally:
        first.close()
        second.close()


def save_when_there(pool: Pool, keys: list[BlockKey]) -> None:
    """Saves a chain; the store takes it as soon as it has been rejoined."""
    save(pool, keys, flush=False)
    while not pool.flush(keys, 0.5):
        retry_writes(pool)
        time.sleep(0.2)


@needs_mooncake
def test_a_master_that_hangs_holds_up_nothing(lone: Master, tmp_path: Path) -> None:
    lone.start()
    pool = pool_of(lone, tmp_path)
    keys = chain(NAMESPACE, 20)
    save_when_there(pool, keys)
    lone.freeze()
    assert pool.find(chain(NAMESPACE, 50, "unknown")).pending, "it waited for the master"
    fresh = chain(NAMESPACE, 50, "fresh")
    save(pool, fresh, flush=False)
    assert recall(pool, fresh) == ("host",) * 50
    pool.close(1.0)  # ends although the master still hangs
    lone.thaw()


@needs_mooncake
def test_blocks_of_a_host_that_died_are_misses_and_the_log_says_so(
    lone: Master, caplog: pytest.LogCaptureFixture
) -> None:
    lone.start()
    lender, other = Node(lone), Node(lone, lends=0)
    lender.store.exists(["ready"])
    item = Object("one", (other.arena.view(0, 64 << 10),))
    assert other.store.put([item]) == [True]
    client = lender.mooncake._client
    assert client is not None
    client._process.kill()
    assert other.store.get([item]) == [False]
    [said] = [text for text in caplog.messages if "did not move" in text]
    assert "a host that lends memory is gone" in said
    del item
    for node in (other, lender):
        node.close()


@needs_mooncake
def test_a_client_that_is_killed_is_replaced(lone: Master, tmp_path: Path) -> None:
    lone.start(client_ttl_s=2)
    node = Node(lone)
    store = node.store
    node.arena.memory[:4096] = bytes(range(256)) * 16
    item = Object("one", (memoryview(bytearray(64)), node.arena.view(0, 4096)))
    assert store.put([item]) == [True]
    client = node.mooncake._client
    assert client is not None
    assert "client_process" in " ".join(psutil.Process(client._process.pid).cmdline())
    client._process.kill()

    def is_put_again() -> bool:
        try:
            return store.put([item]) == [True]
        except TierError:
            return False

    wait_until(is_put_again)
    node.close()


@needs_mooncake
def test_no_section_is_used_again_while_a_call_may_still_write_to_it(lone: Master) -> None:
    """A call that does not end in time ends the process that would write."""
    lone.start()
    node = Node(lone)
    assert node.store.exists(["ready"]) == [False]
    client = node.mooncake._client
    assert client is not None
    process = psutil.Process(client._process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    with pytest.raises(ClientLost, match="did not answer"):
        client.call(ClientRequest("get", ["one"], [0], [64]), 0.2)
    assert not client.is_alive
    node.close()


@needs_mooncake
def test_thousands_of_small_values_in_one_call_are_all_moved(lone: Master) -> None:
    """Mooncake's client refuses more than some 1,000 transfers to a peer at a time."""
    lone.start()
    lender, node = Node(lone), Node(lone, 0)
    assert lender.store.exists(["ready"]) == [False]
    count = ARENA_BYTES // 4096 // 2
    heads = [bytearray(number.to_bytes(64, "big")) for number in range(count)]

    def objects(first: int) -> list[Object]:
        views = (node.arena.view((first + n) * 4096, 4096) for n in range(count))
        return [
            Object(f"small.{n}", (memoryview(head), view))
            for n, (head, view) in enumerate(zip(heads, views, strict=True))
        ]

    half = count * 4096
    node.arena.view(0, half)[:] = os.urandom(half)
    assert all(node.store.put(objects(0)))
    for head in heads:
        head[:] = bytes(64)
    assert all(node.store.get(objects(count)))
    assert bytes(node.arena.view(half, half)) == bytes(node.arena.view(0, half))
    assert [int.from_bytes(head, "big") for head in heads] == list(range(count))
    node.close()
    lender.close()


@needs_mooncake
def test_the_client_goes_with_its_process(lone: Master) -> None:
    lone.start()
    program = (
        "import json, os, sys\n"
        "from kvrecall.pool.remote.mooncake.store import MooncakeSettings, MooncakeStore\n"
        "store = MooncakeStore(MooncakeSettings.of(json.loads(sys.argv[1]))); store.exists(['x'])\n"
        "print(store._client._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = (sys.executable, "-c", program, json.dumps(lone.options()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = ran(*command, cwd=Path(__file__).parents[3], env=environment)
    pid = int(done.stdout.split()[0])
    wait_until(lambda: not psutil.pid_exists(pid))


@needs_mooncake
def test_a_running_master_is_told_from_none(lone: Master) -> None:
    with pytest.raises(TierError, match="no Mooncake master"):
        check_master(lone.host, lone.port)
    lone.start()
    assert check_master(lone.host, lone.port) > 0


def command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvrecall", "pool", "master", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_mooncake
def test_the_master_ends_with_its_command() -> None:
    port, metrics = free_port(), free_port()
    running = command("--port", str(port), "--metrics-port", str(metrics))
    assert running.stdout is not None
    assert running.stdout.readline().startswith(f"kvrecall: Mooncake master on 127.0.0.1:{port}")
    (master,) = psutil.Process(running.pid).children()
    wait_until(lambda: master.name() == "mooncake_master")
    running.kill()
    running.communicate()
    wait_until(lambda: not master.is_running() or master.status() == psutil.STATUS_ZOMBIE)


@needs_mooncake
def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = str(taken.getsockname()[1]), str(free_port())
        for option, other in (("--port", "--metrics-port"), ("--metrics-port", "--port")):
            out, err = (ended := command(option, port, other, free)).communicate()
            assert (ended.returncode, out) == (ExitStatus.WRONG_SETTINGS, "")
            (line,) = err.splitlines()
            assert line.startswith(f"kvrecall: {option}: {port} on 127.0.0.1 is in use; stop its")
            assert line.endswith("or choose another port")


BASE = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
}


def test_the_guides_file_is_taken_as_it_is() -> None:
    guide = {
        **BASE,
        "global_segment_size": 268435456,
        "protocol": "ascend",
        "device_name": "",
        "master_server_address": "localhost:50051",
        "use_ascend_direct": True,
    }
    setup = MooncakeSettings.of(guide).setup
    assert setup["protocol"] == "ascend"
    assert setup["global_segment_size"] == "268435456"
    assert setup["use_ascend_direct"] == "true"
    assert setup["master_server_addr"] == "localhost:50051"
    sizes = {"4GB": 4 << 30, "512 mb": 512 << 20, 1024: 1024, "1.5g": 3 << 29}
    for size, nbytes in sizes.items():
        setup = MooncakeSettings.of({**BASE, "global_segment_size": size}).setup
        assert setup["global_segment_size"] == str(nbytes)


@needs_mooncake
def test_a_protocol_that_the_installed_client_lacks_is_named() -> None:
    folder = package_folder()
    assert folder is not None
    built = built_protocols(folder / "store.so")
    assert "tcp" in built
    assert MooncakeSettings.of(BASE).doubt == ""
    for protocol in {"ascend", "cxl", "efa"} - set(built):
        doubt = MooncakeSettings.of({**BASE, "protocol": protocol}).doubt
        assert f"protocol is '{protocol}'; the Mooncake client installed here is built for" in doubt
        assert f"and not for {protocol}: the remote tier stays off" in doubt
    assert "no such protocol" in MooncakeSettings.of({**BASE, "protocol": "Ascend"}).doubt
    assert MooncakeSettings.of({**BASE, "protocol": "rdma,hip"}).doubt == ""


@needs_mooncake
def test_a_pool_says_it_before_the_client_fails(caplog: pytest.LogCaptureFixture) -> None:
    """In an engine of `vllm serve`, and in a pool service."""
    remote = RemoteConfig(
        kind="mooncake", options={**BASE, "protocol": "maca", "allow_plaintext": True}
    )
    Pool.open(PoolConfig(host_bytes=1 << 20, remote=remote)).close()
    assert caplog.messages[0].startswith("remote: protocol is 'maca'; the Mooncake client")


def test_protocols_are_read_from_the_classes_in_the_binary(tmp_path: Path) -> None:
    binary = tmp_path / "store.so"
    binary.write_bytes(b"\0N8mooncake21AscendDirectTransportE\0N8mooncake12TcpTransportE\0")
    assert built_protocols(binary) == ["tcp", "ascend"]


@needs_mooncake
def test_a_client_that_cannot_be_set_up_says_what_it_is_built_for(lone: Master) -> None:
    lone.start()
    master = f"{lone.host}:{lone.port}"
    setup = {**BASE, "protocol": "cxl", "master_server_address": master}
    store = MooncakeStore(MooncakeSettings.of(setup))
    with pytest.raises(TierError, match=r"cannot be set up .*; the Mooncake client installed here"):
        store.exists(["a"])
    store.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"master_server_address": "localhost"}, "write host:port"),
        ({"metadata_server": None}, "metadata_server is None"),
        ({"global_segment_size": "much"}, "global_segment_size is 'much'"),
        ({"device_name": 3}, "device_name is 3"),
        ({"config": "/no/such.json"}, "there is no file /no/such.json"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MooncakeSettings.of({**BASE, **change})


@pytest.mark.parametrize("away", [{}, {"local_hostname": "10.0.0.2"}])
def test_plaintext_takes_a_key_or_consent_on_loopback_too(away: dict[str, object]) -> None:
    options = {**BASE, **away}
    where = str(options["local_hostname"])
    with pytest.raises(ConfigError, match=f"{where}.*encryption_key_file.*allowPlaintext true"):
        make_store("mooncake", options)
    with pytest.raises(ConfigError, match="allow_plaintext is 'yes'; allowed: true, false"):
        make_store("mooncake", {**options, "allow_plaintext": "yes"})
    make_store("mooncake", options, sealed=True).close()
    make_store("mooncake", {**options, "allow_plaintext": True}).close()
    with pytest.raises(ConfigError, match="--allow-plaintext"):
        MasterFlags(host="10.0.0.1").command()
