"""Ports for servers: none is allocated twice."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvrecall.processes import ports
from kvrecall.processes.ports import free_port

FIRST_CHOICE = (
    "import secrets; secrets.randbelow = lambda _: 0\n"
    "from kvrecall.processes.ports import free_port; print(free_port(), free_port())"
)


def test_two_processes_that_want_the_same_port_get_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.secrets, "randbelow", lambda _: 0)
    mine = {free_port(), free_port()}
    assert len(mine) == 2
    asked = subprocess.run(
        [sys.executable, "-c", FIRST_CHOICE], capture_output=True, text=True, check=True
    )
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
