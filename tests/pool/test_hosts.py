"""Pools as small containers and several hosts have them: real limits, name spaces and versions.

Most need root, or are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrecall.block import TierName
from kvrecall.config import RecallSettings
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine
from pool.service.service import MIB, Service

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
NAMESPACE = namespace()
BLOCK = 60_000
OPEN = """
import sys, time
from kvrecall.config import RecallSettings
from kvrecall.errors import KvrecallError
from kvrecall.pool.pool import Pool
from kvrecall.testing import chain, namespace
from kvrecall.testing.pool_contract import Engine
import json
try:
    pool = Pool.open(RecallSettings.from_mapping(json.loads(sys.argv[1])).pool)
except KvrecallError as error:
    sys.exit(str(error))
pool.register(namespace(), 60_000)
engine = Engine(pool, 60_000)
for number in range(int(sys.argv[2])):
    keys = chain(namespace(), 20, str(number % 50))
    engine.save(keys)
    pool.flush(keys, 60.0)
    engine.recall(keys)
    print(number, flush=True)
if sys.argv[3:]:
    sys.stdin.read()
"""


def opened(settings: dict[str, Any], saves: int, *more: str, before: str = ":") -> Any:
    """A process with a pool, after the shell's ``before``, that saves chains and checks them."""
    program = [sys.executable, "-c", OPEN, json.dumps(settings), str(saves), *more]
    return subprocess.Popen(
        ["sh", "-c", f'{before} || exit 77; exec "$0" "$@"', *program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process: Any) -> tuple[int, str]:
    _, said = process.communicate(timeout=120)
    if process.returncode == 77:
        pytest.skip("this machine does not give that")
    return process.returncode, said


OTHER_HOST = ["unshare", "--uts", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]


def test_a_small_dev_shm_is_no_limit() -> None:
    small = "unshare -m true && mount -t tmpfs -o size=64m none /dev/shm"
    alone = ["unshare", "-m", "sh", "-c", f'{small} || exit 77; exec "$0" "$@"']
    done = subprocess.run(
        [*alone, sys.executable, "-c", OPEN, '{"host_size": "128MiB"}', "110"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 or pytest.skip(f"no name space of mounts: {done.stderr}")
    assert len(done.stdout.splitlines()) == 110


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Of 256 MiB, in which a process may join."""
    is_first = Path("/sys/fs/cgroup/memory").is_dir()  # version 1
    folder = Path("/sys/fs/cgroup", "memory" * is_first, f"kvrecall-test-{os.getpid()}")
    members = folder / "cgroup.procs"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if is_first else "memory.max"
        (folder / limit).write_text(str(256 * MIB))
    except OSError as error:
        pytest.skip(f"may not make a cgroup with a limit of memory: {error}")
    yield members
    wait_until(lambda: not members.read_text())
    folder.rmdir()


def test_memory_of_a_container(tmp_path: Path, cgroup: Path) -> None:
    """Files it has read can be dropped for the pool; what it does not have is named."""
    read = f"echo $$ > {cgroup} && head -c 200M /dev/zero > {tmp_path}/weights"
    assert ended(opened({"host_size": "120MiB"}, 1, before=read)) == (0, "")
    status, said = ended(opened({"host_size": "300MiB"}, 1, before=f"echo $$ > {cgroup}"))
    assert (status, said.startswith("host_size: 0.29 GiB is more than the 0.2")) == (1, True)


def test_a_service_that_the_kernel_kills_for_memory_is_rejoined(
    tmp_path: Path, cgroup: Path
) -> None:
    with Service(tmp_path / "service") as service, contextlib.closing(service.client()) as client:
        client.register(NAMESPACE, BLOCK)
        engine, keys = Engine(client, BLOCK), chain(NAMESPACE, 20)
        engine.save(keys)
        engine.close()
        assert client.flush(keys, 60.0)
        client.arena_handle()
        cgroup.write_text(str(service.pid))
        Path(f"/proc/{service.pid}/oom_score_adj").write_text("1000")
        hog = f"echo $$ > {cgroup}; head -c 300M /dev/zero | tail -n 1 > /dev/null"
        subprocess.run(["sh", "-c", hog], check=False)
        wait_until(lambda: not client.is_connected)
        assert client.find(keys).blocks == 0
        service.kill()
        service.start()
        wait_until(lambda: client.find(keys).tiers == (TierName.DISK,) * 20)


def test_a_folder_is_one_hosts(tmp_path: Path) -> None:
    settings = {"host_size": "8MiB", "disk_path": str(tmp_path / "disk"), "disk_size": "16MiB"}
    program = [sys.executable, "-c", OPEN, json.dumps(settings), "1", "stay"]
    named = ["sh", "-c", 'hostname other-host || exit 77; exec "$0" "$@"', *program]
    with subprocess.Popen(
        [*OTHER_HOST, *named], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        if not first.stdout.readline():
            pytest.skip("no name space of a host")
        status, said = ended(opened(settings, 1))
        first.communicate()
    assert (status, "is in use by process 1 on other-host; stop it" in said) == (1, True)
    assert ended(opened(settings, 1)) == (0, "")


def test_hosts_that_write_the_same_blocks_to_one_directory(tmp_path: Path) -> None:
    """And are killed meanwhile: what another host finds there is right."""
    settings = {
        "host_size": "8MiB",
        "remote": {"kind": "objects", "url": f"file://{tmp_path}/store"},
    }
    for seconds in (0.05, 0.3, 0.6):
        hosts = [opened(settings, 200) for _ in range(2)]
        for host in hosts:
            host.stdout.readline()
        time.sleep(seconds)
        hosts[0].kill()
        hosts[0].communicate()
        assert ended(hosts[1]) == (0, "")
    with Pool.open(RecallSettings.from_mapping(settings).pool) as pool:
        pool.register(NAMESPACE, BLOCK)
        engine = Engine(pool, BLOCK)
        for number in range(50):
            keys = chain(NAMESPACE, 20, str(number))
            wait_until(lambda keys=keys: not pool.find(keys).pending)
            assert engine.recall(keys) == (TierName.REMOTE,) * 20
        engine.close()


@pytest.mark.parametrize("commit", ["503a0268", "aa31f340"])  # protocols 101 and 109
def test_a_client_of_another_version_is_refused_in_one_line(tmp_path: Path, commit: str) -> None:
    old = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True)
    if old.returncode:
        pytest.skip("the repository has no history here")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=old.stdout, check=True)
    program = """
import logging, sys, pathlib
from kvrecall.pool.service.client import ServiceClient
logging.basicConfig(format="%(message)s")
client = ServiceClient(pathlib.Path(sys.argv[1]), 5.0)
print(client.is_connected, client.arena_handle().pid)
client.close()
"""
    with Service(tmp_path / "service") as service:
        done = subprocess.run(
            [sys.executable, "-c", program, service.socket],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        said = done.stderr.splitlines()
        assert done.stdout.split() == ["False", "0"]
        assert f"(protocol {p.PROTOCOL}), the client kvrecall 0.1.0 (protocol 1" in said[0]
        assert len(set(said)) <= 2, said
        with contextlib.closing(ServiceClient(service.socket)) as client:
            assert client.is_connected


WITHOUT_RIGHTS = """
import ctypes, os, pathlib, sys
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import KvrecallError
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing import chain, namespace
from kvrecall.testing.pool_contract import Engine

own, closed = map(pathlib.Path, sys.argv[1:])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # as after exec: others of this user may see its files
disk, keys = DiskConfig(own / "disk", 16 << 20), chain(namespace(), 10)
for life in range(2):
    service = ServiceThread(PoolConfig(8 << 20, disk), own / "pool.sock")
    client = ServiceClient(own / "pool.sock", 60.0)
    client.register(namespace(), 60_000)
    engine = Engine(client, 60_000)
    if not life:
        engine.save(keys)
        client.flush(keys, 60.0)
    print(*sorted(set(engine.recall(keys))))
    engine.end()
    service.close()
for refused in (
    lambda: DiskTier(DiskConfig(closed / "disk", 16 << 20)),
    lambda: ServiceThread(PoolConfig(1 << 20), closed / "pool.sock"),
):
    try:
        refused()
    except KvrecallError as error:
        print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_rights_has_a_pool_of_its_own() -> None:
    with tempfile.TemporaryDirectory(prefix="kvrecall-test-") as name:
        own, closed = Path(name, "own"), Path(name, "closed")
        for place in (own, closed):
            place.mkdir(0o700)
        Path(name).chmod(0o755)
        os.chown(own, 65534, 65534)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, own, closed],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        *found, disk, socket = done.stdout.splitlines() or pytest.fail(done.stderr)
        assert (found, done.returncode) == (["host", "disk"], 0)
        assert "closed/disk cannot be reached: Permission denied; give this user access" in disk
        assert "closed/pool.sock: Permission denied; give another path" in socket
