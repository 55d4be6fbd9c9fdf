"""The service that the replicas of one server share: started again when it dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvrecall.block import TierName
from kvrecall.pool.service.child import ChildService
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine

NAMESPACE = namespace("child")
BLOCK = 60_000


def test_a_child_service_that_is_killed_comes_back_with_its_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "own"
    settings = {"host_size": "16MiB", "disk_path": str(tmp_path / "disk"), "disk_size": "64MiB"}
    service = ChildService(settings | {"socket": str(folder / "pool.sock")})
    client = ServiceClient(folder / "pool.sock", call_timeout_s=60.0)
    client.register(NAMESPACE, BLOCK)
    engine = Engine(client, BLOCK)
    keys = chain(NAMESPACE, 20)
    engine.save(keys)
    engine.close()
    assert client.flush(keys, 60.0)
    for _ in range(2):
        client.arena_handle()  # the step's orders went out
        first = service.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: client.find(keys).tiers == (TierName.DISK,) * 20)
        assert service.pid != first
        engine = Engine(client, BLOCK)
        assert engine.recall(keys) == (TierName.DISK,) * 20
        engine.close()
        assert f"(process {first}) ended with status -9" in caplog.text
    client.close()
    service.close()
    assert not Path(f"/proc/{service.pid}").exists()
    assert not (folder / "pool.sock").exists()


def test_a_child_service_that_does_not_come_back_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "own"
    service = ChildService({"host_size": "1MiB", "socket": str(folder / "pool.sock")})
    folder.chmod(0o755)  # a service refuses to listen there
    os.kill(service.pid, signal.SIGKILL)
    wait_until(lambda: "did not start: socket: " in caplog.text)
    folder.chmod(0o700)
    wait_until(lambda: "the pool service was restarted" in caplog.text)
    client = ServiceClient(folder / "pool.sock", call_timeout_s=60.0)
    assert client.is_connected
    client.close()
    service.close()
