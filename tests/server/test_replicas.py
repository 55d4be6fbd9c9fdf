"""Data-parallel replicas of one server: one pool for all of them, which ends with the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvrecall.errors import TierError
from kvrecall.pool.service.admin import ServiceAdmin, Stat
from kvrecall.pool.service.child import ChildService
from server.live import LiveServer, all_gone, serving

TEXT = "The quick brown fox jumps over the lazy dog. " * 20  # 900 tokens, 7 blocks of 128 and 4
HOST, DISK = 32 << 20, 64 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("replicas")
    settings = {"admin_socket": f"{folder}/pool/pool.sock", "load_or_compute": "load"}
    (folder / "pool.json").write_text(json.dumps(settings))
    words = ["--pool-config", str(folder / "pool.json"), "--disk-path", str(folder / "disk")]
    words += ["--disk-size", str(DISK), "--no-async-write"]
    options = ["--data-parallel-size", "2"]
    with serving(folder, words, options, longest=2048, warm=False) as live:
        yield live


def complete(server: LiveServer, replica: int, text: str) -> tuple[str, dict[str, int]]:
    """The answer of a replica, and where the prompt's tokens came from."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0}
    headers = {"x-data-parallel-rank": str(replica)}
    reply = server.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["recall"]


@pytest.mark.long
@pytest.mark.engine
def test_a_replica_recalls_what_another_computed(server: LiveServer) -> None:
    first, came_from = complete(server, 0, TEXT)
    assert came_from["computed"] == 900
    for replica in range(2):  # the second audits its first hit: what was written before is proved
        complete(server, replica, "Once upon a time there was " + TEXT)
    second, came_from = complete(server, 1, TEXT)
    assert came_from["host"] == 896
    assert second == first


@pytest.mark.long
@pytest.mark.engine
def test_sizes_are_limits_of_all_replicas_together(server: LiveServer) -> None:
    with ServiceAdmin(server.folder / "pool" / "pool.sock", 60.0) as admin:
        overview = admin.do(Stat())
    capacities = {tier.name: tier.capacity_bytes for tier in overview.stats.tiers}
    assert capacities == {"host": HOST, "disk": DISK}
    assert len({client.pid for client in overview.clients} - {os.getpid()}) == 2
    shown = server.client.get("/dashboard/data.json").json()["sample"]["tiers"]
    assert shown["host"]["capacity_bytes"] == HOST


@pytest.mark.long
@pytest.mark.engine
def test_the_pool_ends_with_a_server_that_is_killed(server: LiveServer) -> None:
    """And vLLM's shared memory: Python's tracker, which survives, removes its names."""
    family = server.family()
    places = [place.path for process in family for place in process.memory_maps()]
    assert (shared := [Path(one) for one in places if one.startswith("/dev/shm/psm_")])
    assert any("kvrecall.pool.service.child" in " ".join(p.cmdline()) for p in family)
    os.kill(server.process.pid, signal.SIGKILL)
    assert all_gone(family)
    assert not [path for path in shared if path.exists()]


def test_a_child_service_ends_when_it_is_closed(tmp_path: Path) -> None:
    socket = tmp_path / "own" / "pool.sock"
    child = ChildService({"host_size": "1MiB", "socket": str(socket)})
    process = psutil.Process(child.pid)
    with ServiceAdmin(socket, 60.0) as admin:
        assert admin.do(Stat()).stats.tiers[0].capacity_bytes == 1 << 20
    child.close()
    assert not process.is_running()
    assert not socket.exists()


def test_a_child_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"did not start: .*disk_path is set but disk_size is not"):
        ChildService({"disk_path": str(tmp_path / "disk"), "socket": str(tmp_path / "pool.sock")})


def test_a_child_service_ends_with_its_killed_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from kvrecall.pool.service.child import ChildService\n"
        "child = ChildService({'host_size': '1MiB', 'socket': sys.argv[1]})\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "own" / "pool.sock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert all_gone([child])
