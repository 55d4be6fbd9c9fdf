"""A service's life from the outside: start, stop, administration by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.clocks import HostClocks

from kvrecall.block import TierName
from kvrecall.config import (
    DiskConfig,
    PoolConfig,
    PoolTerms,
    RecallSettings,
    TenantRules,
    TenantTerms,
)
from kvrecall.errors import ConfigError
from kvrecall.pool.base import Verdict
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient, open_pool
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine
from pool.service.command import as_json, pool
from pool.service.service import Service

ONE, TWO = namespace("one"), namespace("two")
SIZES = {ONE: 60_000, TWO: 9_000}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "service") as service:
        yield service


def fill(service: Service, blocks: int = 20) -> None:
    client = service.client()
    for name, size in SIZES.items():
        client.register(name, size)
        engine = Engine(client, size)
        engine.save(chain(name, blocks))
        engine.close()
        assert client.flush(chain(name, blocks), 60.0)
    client.close()


def test_sigterm_stores_what_is_queued_and_ends_in_order(service: Service) -> None:
    client = service.client(ONE, SIZES[ONE])
    keys = chain(ONE, 100)
    engine = Engine(client, SIZES[ONE])
    engine.save(keys)
    client.arena_handle()  # the step's orders went out
    client.find(keys)  # the service has taken everything
    assert service.stop() == 0
    assert not service.socket.exists()
    service.start()
    wait_until(lambda: client.find(keys).tiers == (TierName.DISK,) * 100)
    engine.close()


def test_a_second_service_is_refused_and_a_dead_ones_socket_replaced(
    service: Service, tmp_path: Path
) -> None:
    disk = ("--disk-path", service.folder / "disk", "--disk-size", "64MiB", "--host-size", "16MiB")
    for options, text in (
        (("--socket", service.socket), "is already served by process"),
        (("--socket", service.folder / "other.sock"), "is in use by process"),
    ):
        second = pool("serve", *options, *disk)
        assert second.exit_code == 1
        assert text in second.stderr
        assert str(service.pid) in second.stderr
        assert second.stderr.count("\n") == 1
    assert service.look().pid == service.pid
    service.kill()
    assert service.socket.exists()
    service.start()
    assert service.look().pid == service.pid


def test_serve_reads_pool_json(tmp_path: Path) -> None:
    config = tmp_path / "pool.json"
    config.write_text(json.dumps({"socket": str(tmp_path / "s"), "host_sise": "1MiB"}))
    done = pool("serve", "--config", config)
    assert done.exit_code == 2
    assert "did you mean 'host_size'" in done.stderr
    config.write_text(
        json.dumps({"backend": "service", "socket": str(tmp_path / "s"), "host_size": "16MiB"})
    )
    code = "from kvrecall.pool_cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "host 16 MiB, disk none" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_marked_namespace_stays_marked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever a client sends, and after a kill and a restart of the command."""
    at = tmp_path / "s"
    digest = ONE.digest.hex()
    code = "from kvrecall.pool_cli import app; app()"
    words = f"serve --socket {at} --host-size 16MiB --disk-path {tmp_path}/d --disk-size 64MiB"

    def serve(*marks: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words.split(), *marks],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(process.kill)
        assert process.stdout is not None
        assert ("read-only" in process.stdout.readline()) == bool(marks)
        return process

    wrong = pool(*words.split(), "--read-only-namespaces", "abc")
    assert (wrong.exit_code, "8 to 32 hex digits" in wrong.stderr) == (2, True)
    process = serve()
    client = ServiceClient(at, call_timeout_s=60.0)
    client.register(ONE, SIZES[ONE])
    engine, keys, new = Engine(client, SIZES[ONE]), chain(ONE, 6), chain(ONE, 2, "new")
    engine.save(keys)
    assert client.flush(keys, 60.0)
    for _ in range(2):
        process.kill()
        process.wait(60)
        process = serve("--read-only-namespaces", digest[:12])
        pid = process.pid
        wait_until(lambda pid=pid: client.arena_handle().pid == pid)
        engine.close()
        engine = Engine(client, SIZES[ONE])
        assert client.find(keys).tiers == (TierName.DISK,) * 6
        client.clear()
        client.retire([ONE.digest])
        client.register(ONE, SIZES[ONE])
        assert engine.save(new) == {Verdict.REFUSED: 2}
        assert engine.recall(keys) == (TierName.DISK,) * 6
        assert as_json("stat", "--socket", at)["stats"]["refused"] >= 2
        assert as_json("ls", "--socket", at)["rows"][0]["disk_blocks"] == 6
    with pytest.raises(ConfigError, match="no effect with backend 'service'"):
        RecallSettings.from_mapping({"backend": "service", "read_only_namespaces": [digest]})
    engine.close()
    client.close()
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log.count(f"namespace {digest} is read-only by this pool's settings") == 1


def test_no_service_is_said_with_the_cure(tmp_path: Path) -> None:
    for command in ("stat", "ls", "verify", "clear"):
        done = pool(command, "--socket", tmp_path / "none.sock")
        assert done.exit_code == 1
        assert "start one with: kvrecall pool serve --socket" in done.stderr


def test_drop_and_clear(service: Service) -> None:
    fill(service)
    at = ("--socket", service.socket)
    rows = {row["parts"]["model"]: row for row in as_json("ls", *at)["rows"]}
    assert rows["one"]["block_bytes"] == 60_000
    assert as_json("drop", "--older-than", "1h", *at, "--yes")["dropped"] == 0
    one = ("drop", "-n", rows["one"]["name"][:8], *at)
    assert as_json(*one, "--dry-run") == {"dropped": 20, "pinned": 0}
    refused = pool(*one)
    assert refused.exit_code == 2
    assert "add --yes, or --dry-run" in refused.stderr
    assert as_json(*one, "--yes") == {"dropped": 20, "pinned": 0}
    client = service.client()
    assert [client.find(chain(name, 20)).blocks for name in (ONE, TWO)] == [0, 20]
    assert pool("drop", *at).exit_code == 2
    assert pool("drop", "-n", "zz", *at).exit_code == 2
    assert pool("clear", *at).exit_code == 2
    assert as_json("clear", *at, "--dry-run")["dropped"] == 20
    assert as_json("clear", *at, "-y")["dropped"] == 20
    assert client.find(chain(TWO, 20)).blocks == 0


@pytest.mark.parametrize("offline", [False, True])
def test_verify_finds_and_drops_damage(service: Service, offline: bool) -> None:
    fill(service)
    if offline:
        service.stop()
    slabs = sorted((service.folder / "disk").glob("slab-*.kv"))
    with slabs[0].open("r+b") as file:
        file.seek(4096 + 70)
        byte = file.read(1)
        file.seek(4096 + 70)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    disk = service.folder / "disk"
    at = ("--disk-path", disk) if offline else ("--socket", service.socket)
    assert pool("verify", *at).exit_code == 2, "it asks, and there is no terminal"
    trial = pool("verify", *at, "--dry-run")
    assert trial.exit_code == 1
    assert "40 blocks checked, 1 damaged (kept)" in trial.stdout
    first, second = pool("verify", *at, "--yes"), pool("verify", "--json", *at, "--yes")
    assert first.exit_code == 1
    assert "40 blocks checked, 1 damaged (deleted)" in first.stdout
    assert second.exit_code == 0
    assert json.loads(second.stdout) == {"checked": 39, "damaged": 0}
    assert sum(row["disk_blocks"] for row in as_json("ls", *at)["rows"]) == 39
    if not offline:
        held = pool("verify", "--disk-path", disk)
        assert held.exit_code == 1
        assert "in use by process" in held.stderr


def test_many_blocks_are_one_message(service: Service) -> None:
    client = service.client(ONE, SIZES[ONE])
    keys = chain(ONE, 1000)

    def requests() -> int:
        return max(view.requests for view in service.look().clients)

    before = requests()
    client.find(keys)
    client.release(client.acquire(keys[:8], 1.0))
    client.reserve(keys[:8])
    client.commit(keys[:8])
    wait_until(lambda: requests() == before + 5)


def test_one_engines_clear_leaves_the_others_blocks(service: Service) -> None:
    fill(service)
    one, two = (service.client(name, SIZES[name]) for name in (ONE, TWO))
    one.clear()
    assert one.find(chain(ONE, 20)).blocks == 0
    assert two.find(chain(TWO, 20)).blocks == 20


def test_settings_choose_the_pool(service: Service) -> None:
    settings = RecallSettings.from_mapping({"backend": "service", "socket": str(service.socket)})
    client = open_pool(settings)
    assert isinstance(client, ServiceClient)
    assert client.is_connected
    client.close()
    embedded = open_pool(RecallSettings.from_mapping({"host_size": "16MiB"}))
    assert isinstance(embedded, Pool)
    embedded.close()


def test_a_namespace_too_large_for_the_arena_is_named(service: Service) -> None:
    client = service.client()
    with pytest.raises(ConfigError, match="cannot hold one block"):
        client.register(namespace("huge"), 1 << 40)
    with pytest.raises(KeyError, match="was not registered"):
        client.reserve(chain(namespace("huge"), 1))


def test_blocks_that_are_not_used_expire(tmp_path: Path) -> None:
    disk = DiskConfig(tmp_path / "disk", 64 << 20)
    terms = PoolTerms(tenants=TenantRules(TenantTerms(ttl_s=1000.0)))
    host = HostClocks()
    service = ServiceThread(
        PoolConfig(16 << 20, disk, terms=terms),
        tmp_path / "sock",
        make=partial(Pool.open, clock=host.clock()),
    )
    client = ServiceClient(tmp_path / "sock", call_timeout_s=60.0)
    client.register(ONE, SIZES[ONE])
    engine = Engine(client, SIZES[ONE])
    assert engine.save(chain(ONE, 10)) == {Verdict.RESERVED: 10}
    assert client.flush(chain(ONE, 10), 60.0)
    host.advance(1001.0)
    wait_until(lambda: not list(service.pool.admin.blocks()))  # a look-up would be a use
    assert client.find(chain(ONE, 10)).blocks == 0
    engine.close()
    client.close()
    service.close()
