"""`make demo`, `make demo-mooncake` and `make serve`: the whole of each, over a shorter text."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from pool.remote.mooncake import needs_mooncake
from server.live import LiveServer
from support.commands import ran

from kvrecall.demo.cli import request
from kvrecall.processes.ports import free_port
from kvrecall.testing import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (ROOT / ".venv" / "bin" / "python").exists(),
        reason="make would set an environment up first; run `make setup`",
    ),
]


def played(target: str) -> dict[str, Any]:
    """The demo's result."""
    done = ran("make", "-C", ROOT, target, "DEMO=--characters 9000 --json", timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    summary: dict[str, Any] = json.loads(told)
    return summary


@pytest.mark.longest
def test_the_demo_recalls_from_every_tier() -> None:
    said = played("demo")
    assert (said["ok"], said["tokens_equal"], said["answers_right"]) == (True, True, True)
    assert min(said[f"{tier}_hit_tokens"] for tier in ("device", "host", "disk")) > 2000


@pytest.mark.longest
@needs_mooncake
def test_the_demo_of_mooncake_loses_its_master_and_no_request() -> None:
    said = played("demo-mooncake")
    assert (said["ok"], said["tokens_equal"], said["engines"]) == (True, True, 2)
    assert (said["master_restarted"], said["requests_failed"]) == (True, 0)
    assert said["remote_hit_tokens"] > 2000


@pytest.mark.long
def test_readmes_hit_after_a_restart_is_kvrecalls(tmp_path: Path) -> None:
    """Both readmes' command, which `make serve` prints: the device holds nothing after a restart,
    so the prompt comes from disk."""
    port = free_port()
    command = request(port)
    pages = [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]
    assert all(request(8000) in page for page in pages)
    url = f"http://127.0.0.1:{port}"
    for turn in range(2):
        words = ([f"SERVE=--port {port}"], url)
        server = LiveServer(tmp_path, *words, program=("make", "-C", str(ROOT), "serve"))
        try:
            server.wait_ready()
            wait_until(lambda log=server: command in log.log)
            done = ran("bash", "-c", command)
            assert '"recall":{"device":0,' in done.stdout
            if turn == 1:
                assert '"disk":768,"remote":0,"computed":132' in done.stdout
                assert all('"disk":768,"remote":0,"computed":132' in page for page in pages)
            assert server.client.get("/dashboard").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) is not None
        finally:
            server.close()
