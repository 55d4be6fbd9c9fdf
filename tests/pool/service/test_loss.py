"""Services and engines that are killed, suspended and disconnected: no wrong bytes, no leaks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrecall.block import BlockKey, TierName
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.service import link
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.client import ServiceClient, _Life
from kvrecall.pool.service.link import Link
from kvrecall.processes.command import as_child
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine
from pool.service.service import Service

PLAYER = Path(__file__).with_name("player.py")
NAMESPACE = namespace("loss")
BLOCK = 60_000


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "service") as service:
        yield service


@pytest.fixture
def client(service: Service) -> ServiceClient:
    return service.client(NAMESPACE, BLOCK)


def saved(client: ServiceClient, blocks: int, name: str = "") -> list[BlockKey]:
    keys = chain(NAMESPACE, blocks, name)
    engine = Engine(client, BLOCK)
    engine.save(keys)
    engine.close()
    assert client.flush(keys, 60.0)
    return keys


_players: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_player_is_left() -> Iterator[None]:
    """However a test ends."""
    yield
    while _players:
        process = _players.pop()
        process.kill()
        process.wait()


def player(service: Service, role: str, seed: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        as_child(sys.executable, str(PLAYER), str(service.socket), role, str(seed)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _players.append(process)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_without_a_service_everything_is_a_miss_until_there_is_one(tmp_path: Path) -> None:
    client = ServiceClient(tmp_path / "service" / "pool.sock", 60.0)
    client.register(NAMESPACE, BLOCK)
    keys = chain(NAMESPACE, 4)
    assert client.find(keys).blocks == 0
    assert client.locate(keys).tiers == (None,) * 4
    assert {answer.verdict for answer in client.reserve(keys)} == {Verdict.REFUSED}
    assert client.stats().tiers == ()
    assert client.stats().pool_up == 0
    with Service(tmp_path / "service"):
        wait_until(lambda: client.is_connected)
        client.find(keys)
        assert client.stats().pool_up == 1
        assert len(saved(client, 4)) == 4
        assert client.find(keys).blocks == 4
        client.close()


def test_a_missing_service_is_looked_for_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def fail(*given: object) -> None:
        tries.append(given)
        raise link.LinkLost("no service")

    monkeypatch.setattr(_Life, "open", fail)
    with contextlib.closing(ServiceClient(tmp_path / "pool.sock")):
        time.sleep(0.5)
    assert 2 <= len(tries) <= 6


def test_a_client_reads_bytes_of_blocks_that_it_holds(
    service: Service, client: ServiceClient
) -> None:
    ticket = client.acquire(saved(client, 2), 5.0)
    wait_until(lambda: len(client.poll(ticket).offsets) == 2)
    offsets = client.poll(ticket).offsets
    with contextlib.closing(Arena.attach(client.arena_handle())) as arena:
        held = [bytes(arena.view(offset, 24)[8:]) for offset in offsets]
    assert client.read(offsets, 8, 16) == held
    assert any(held[0])
    service.kill()
    wait_until(lambda: not client.is_connected)
    assert client.read(offsets, 8, 16) == []


def test_killed_service_costs_misses_and_is_rejoined(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client(NAMESPACE, BLOCK)
    keys = saved(client, 50)
    before = client.stats()
    ticket = client.acquire(keys, 5.0)
    other = chain(NAMESPACE, 5, "other")
    assert client.reserve(other)[0].verdict is Verdict.RESERVED
    old = client.arena_handle()
    service.kill()
    wait_until(lambda: not client.is_connected)
    with monkeypatch.context() as patch:
        for name in ("ask", "tell"):
            patch.setattr(Link, name, pytest.fail)  # no call asks one that is dead
        assert client.find(keys).blocks == 0
        assert client.locate(keys).tiers == (None,) * 50
        assert client.poll(ticket).offsets == ()
        assert client.poll(ticket).state is RecallState.READY
        assert {a.verdict for a in client.reserve(keys)} == {Verdict.REFUSED}
        client.commit(other[:2])
        client.abandon(other[2:])
        client.touch(keys)
        assert not client.flush(keys, 10.0)
        client.release(ticket)
    assert client.arena_handle() == old
    service.start()
    wait_until(lambda: client.find(keys).tiers == (TierName.DISK,) * 50)
    assert client.arena_handle() != old
    engine = Engine(client, BLOCK)
    assert engine.recall(keys) == (TierName.DISK,) * 50
    assert client.find(other).blocks == 0
    assert engine.save(other) == {Verdict.RESERVED: 5}
    stats = client.stats()
    assert stats.lookups > before.lookups
    assert stats.tiers[1].writes >= before.tiers[1].writes, "counters went back"
    engine.close()


def test_a_connection_made_while_the_client_closes_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In faults, seed 47, it stayed open at the service for the life of the process."""
    client = service.client()
    begun, go_on = threading.Event(), threading.Event()
    connect = ServiceClient._connect

    def late(self: ServiceClient) -> Any:
        begun.set()
        go_on.wait()
        return connect(self)

    monkeypatch.setattr(ServiceClient, "_connect", late)
    assert client._life is not None
    client._life.fail("a test")
    assert begun.wait(10.0)
    closing = threading.Thread(target=client.close)
    closing.start()
    wait_until(client._closed.is_set)
    go_on.set()
    closing.join()
    assert client._next is not None
    assert client._next.is_lost


def test_offsets_and_handles_of_two_services_never_mix(
    service: Service, client: ServiceClient
) -> None:
    keys = saved(client, 4)
    old = client.arena_handle()
    ticket = client.acquire(keys, 5.0)
    wait_until(lambda: len(client.poll(ticket).offsets) == 4)
    service.kill()
    service.start()
    wait_until(lambda: client._next is not None)
    assert client.find(keys).blocks == 0, "offsets of the old arena are not sent yet"
    assert client.arena_handle() == old
    assert {a.verdict for a in client.reserve(keys)} == {Verdict.REFUSED}
    assert client.poll(ticket).offsets == ()
    assert client.find(keys).blocks == 4
    assert client.arena_handle() != old


def test_a_copy_for_a_lost_service_does_not_commit_a_new_reservation(
    service: Service, client: ServiceClient
) -> None:
    keys = chain(NAMESPACE, 3)
    assert client.reserve(keys)[0].verdict is Verdict.RESERVED
    client.arena_handle()
    service.kill()
    service.start()
    wait_until(lambda: client._next is not None)
    assert client.find(keys).blocks == 0
    assert {a.verdict for a in client.reserve(keys)} == {Verdict.REFUSED}
    client.commit(keys)  # the copy into the old arena has ended
    assert client.find(keys).blocks == 0
    assert client.stats().reserved == 0
    engine = Engine(client, BLOCK)
    assert engine.save(keys) == {Verdict.RESERVED: 3}
    assert len(engine.recall(keys)) == 3
    engine.close()


def test_stalled_service_costs_one_deadline_and_leaks_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client(NAMESPACE, BLOCK)
    keys = saved(client, 10)
    ticket = client.acquire(keys, 5.0)
    waits: list[int] = []
    wait = Link._await

    def counted(link: Link, number: int, until: float) -> p.Reply:
        if threading.current_thread() is threading.main_thread():
            waits.append(number)
        return wait(link, number, until)

    service.pause()
    client._timeout_s = 0.2
    monkeypatch.setattr(Link, "_await", counted)
    assert {a.verdict for a in client.reserve(chain(NAMESPACE, 5, "x"))} == {Verdict.REFUSED}
    for _ in range(50):
        assert client.find(keys).blocks == 0
        assert client.poll(ticket).offsets == ()
    assert len(waits) == 1, "more than one call waited out its deadline"
    client._timeout_s = 60.0
    client.release(ticket)
    service.resume()
    wait_until(lambda: client.find(keys).blocks == 10)
    wait_until(lambda: client.stats().reserved == 0)
    assert client.stats().leases == 0


def test_connection_lost_by_a_living_client_keeps_its_slots_until_it_is_done(
    service: Service, client: ServiceClient
) -> None:
    keys = saved(client, 4)
    filling = chain(NAMESPACE, 3, "filling")
    assert client.reserve(filling)[0].verdict is Verdict.RESERVED
    ticket = client.acquire(keys, 5.0)
    wait_until(lambda: len(client.poll(ticket).offsets) == 4)
    handle = client.arena_handle()
    assert client._life is not None
    client._life._sock.send(b"\xff" * 64)
    wait_until(lambda: client._next is not None)
    client.find(keys)
    assert client.arena_handle() == handle, "the same service, the same arena"
    assert client.find(keys).blocks == 4
    lost = [view for view in service.look().clients if view.lost]
    assert [(view.reserved, view.tickets) for view in lost] == [(3, 1)]
    reaped_beside(service, client, 4, 3)
    other = service.client()
    assert {a.verdict for a in other.reserve([]) + client.reserve(filling)} == {Verdict.PRESENT}
    client.commit(filling)
    assert client.find(filling).blocks == 0, "a lost reservation was committed"
    client.release(ticket)
    wait_until(lambda: (client.stats().leases, client.stats().reserved) == (0, 0))
    assert not [view for view in service.look().clients if view.lost]


@pytest.mark.parametrize("adopted", [False, True])
def test_a_client_that_closes_settles_what_it_lost(service: Service, adopted: bool) -> None:
    """Its process lives on, and does not hold slots for it."""
    client, other = service.client(NAMESPACE, BLOCK), service.client()
    client.acquire(saved(client, 4), 5.0)
    client.reserve(chain(NAMESPACE, 3, "filling"))
    assert client._life is not None
    client._life._sock.send(b"\xff" * 64)
    wait_until(lambda: client._next is not None)
    if adopted:
        client.arena_handle()
        client.find(chain(NAMESPACE, 4))
    client.close()
    wait_until(lambda: (other.stats().leases, other.stats().reserved) == (0, 0), 5.0)
    assert not [view for view in service.look().clients if view.lost]


def reaped_beside(service: Service, client: ServiceClient, leases: int, reserved: int) -> None:
    """Another client is killed, and the service gives back what that one held, and no more."""
    process = player(service, "hold", 1)
    line_of(process)
    assert (client.stats().leases, client.stats().reserved) == (leases + 10, reserved + 10)
    process.kill()
    process.wait()
    wait_until(lambda: client.stats().reserved <= reserved)
    assert (client.stats().leases, client.stats().reserved) == (leases, reserved)


def test_a_service_without_files_left_does_not_take_the_living_for_dead(service: Service) -> None:
    """A client that lost its connection keeps its slots."""
    client, beside = (service.client(NAMESPACE, BLOCK) for _ in range(2))
    keys, own = saved(client, 3), chain(NAMESPACE, 3, "own")
    assert client.reserve(own)[0].verdict is Verdict.RESERVED
    assert len(client.poll(client.acquire(keys, 5.0)).offsets) == 3
    process = player(service, "hold", 1)
    line_of(process)
    life = client._life
    assert life is not None
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (5, 4096))
    client._closed.set()  # it shall not come back
    life._sock.send(b"\xff" * 64)
    process.kill()
    process.wait()
    wait_until(lambda: beside.stats().reserved <= 3)
    assert (beside.stats().leases, beside.stats().reserved) == (3, 3)
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (4096, 4096))
    wait_until(lambda: bool([view for view in service.look().clients if view.lost]))
    assert (beside.stats().leases, beside.stats().reserved) == (3, 3)


def test_killed_client_gives_back_leases_and_slots(service: Service, client: ServiceClient) -> None:
    process = player(service, "hold", 1)
    line_of(process)
    assert (client.stats().leases, client.stats().reserved) == (10, 10)
    process.kill()
    wait_until(lambda: client.stats().leases + client.stats().reserved == 0)
    process.wait()


@pytest.mark.parametrize("option", [link._PEER_PIDFD, 9999], ids=["new kernel", "before 6.5"])
def test_a_peer_is_dead_once_its_process_is(monkeypatch: pytest.MonkeyPatch, option: int) -> None:
    """Also if a child of it keeps the connection open."""
    monkeypatch.setattr(link, "_PEER_PIDFD", option)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0kvrecall-test-" + os.urandom(8).hex().encode())
        listener.listen()
        code = "import os, socket, sys, time; s = socket.socket(socket.AF_UNIX)\n"
        code += "s.connect(bytes.fromhex(sys.argv[1])); os.fork(); time.sleep(60)"
        command = [sys.executable, "-c", code, listener.getsockname().hex()]
        process = subprocess.Popen(command, start_new_session=True)
        connection, _ = listener.accept()
        peer = link.Peer.of(connection)
        assert (peer.pid, peer.is_alive) == (process.pid, True)
        process.kill()
        process.wait()
        assert not peer.is_alive
        peer.close()
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_slots_wait_for_the_worker_of_a_killed_engine(
    service: Service, client: ServiceClient
) -> None:
    process = player(service, "workers", 2)
    worker = int(line_of(process))
    assert (client.stats().leases, client.stats().reserved) == (10, 10)
    process.kill()
    process.wait()
    try:
        wait_until(lambda: client.stats().leases == 0)  # and the seat was tried in the same turn
        assert client.stats().reserved == 10, "a worker is still writing to these"
    finally:
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: client.stats().reserved == 0)


def test_wrong_bytes_never_under_load_and_kills(service: Service) -> None:
    players = [player(service, "play", seed) for seed in range(2)]
    victim = player(service, "play", 99)
    for process in [*players, victim]:
        assert line_of(process) == "ready\n"

    def play(lookups: int) -> None:
        """Until the players have looked up so many blocks more."""
        before = service.look().stats.lookups
        wait_until(lambda: service.look().stats.lookups >= before + lookups)

    for _ in range(2):
        play(1000)
        service.kill()
        service.start()
    play(1000)
    victim.kill()
    victim.wait()
    play(1000)
    for process in players:
        assert process.stdin is not None
        process.stdin.write("enough\n")
        process.stdin.flush()
    seen = [json.loads(line_of(process)) for process in players]
    for process in players:
        assert process.wait(60) == 0
    for one in seen:
        assert one["wrong"] == 0
        assert one["recalled"] > 100
        assert one["saved"] > 100
        assert one["cuts"] > 0
    wait_until(lambda: service.look().stats.leases + service.look().stats.reserved == 0)
