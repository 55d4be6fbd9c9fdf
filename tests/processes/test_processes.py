"""Ports that are given to one, servers that are driven, children that end with a command."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from server.live import all_gone
from support.commands import ran

from kvrecall.errors import EngineError
from kvrecall.processes import ports
from kvrecall.processes.ports import free_port
from kvrecall.processes.server import ServerProcess, _with_port


def test_the_port_goes_before_vllm_options() -> None:
    assert _with_port(["m"], 7) == ["m", "--port", "7"]
    assert _with_port(["m", "--", "--x"], 7) == ["m", "--port", "7", "--", "--x"]


def test_a_server_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    lines: list[str] = []
    server = ServerProcess([str(tmp_path / "no-such-model")], tmp_path / "log", lines.append)
    with pytest.raises(EngineError, match="no-such-model"), server:
        pass
    server.stop()


def test_a_device_that_does_not_forget_is_asked_again_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM replies 200 and ``success: false`` while blocks are held."""
    refusals = 2

    class Held(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal refusals
            refusals -= 1
            body = json.dumps({"success": refusals < 0}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    server = ServerProcess([], tmp_path / "log", lambda _: None)
    monkeypatch.setattr(server, "ask", lambda text, _: asked.append(text))
    with HTTPServer(("127.0.0.1", 0), Held) as listening:
        server.port = listening.server_port
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.forget_device()
        assert len(asked) == 2
        refusals = 10**9
        monkeypatch.setattr("kvrecall.processes.server.SETTLE_TIMEOUT_S", 0.1)
        with pytest.raises(EngineError, match="still holds blocks"):
            server.forget_device()
        listening.shutdown()


_OURS = """
from pathlib import Path
from kvrecall.processes.service import ServiceProcess
service = ServiceProcess(Path({folder!r}) / "pool", 16 << 20, 64 << 20)
service.start()
print(service.pid, flush=True)
input()
"""
_FOREIGN = """
import subprocess
from kvrecall.processes.command import as_child
process = subprocess.Popen(as_child("sleep", "1000"))
print(process.pid, flush=True)
input()
"""


@pytest.mark.parametrize("program", [_OURS, _FOREIGN], ids=["ours", "foreign"])
def test_a_child_ends_with_a_parent_that_is_killed(program: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", program.format(folder=str(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    parent.communicate()
    assert all_gone([child]), child


FIRST_CHOICE = (
    "import secrets; secrets.randbelow = lambda _: 0\n"
    "from kvrecall.processes.ports import free_port; print(free_port(), free_port())"
)


def test_two_processes_that_want_the_same_port_get_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: 0)
    mine = {free_port(), free_port()}
    assert len(mine) == 2
    asked = ran(sys.executable, "-c", FIRST_CHOICE, check=True)
    theirs = {int(word) for word in asked.stdout.split()}
    assert len(mine | theirs) == 4


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: 0)
    port = free_port()
    monkeypatch.setattr(ports, "_claim", lambda _: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert free_port() != port


def test_it_lies_where_no_outgoing_connection_is_given_one() -> None:
    low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    if int(low) < 4096:
        pytest.skip("outgoing connections may be given any port here")
    assert 1024 <= free_port() < int(low)
