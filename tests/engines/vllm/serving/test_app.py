"""Listeners with TLS: connections that begin no handshake; and which replicas share a service."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from server.certificates import Authority
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvrecall.engines.vllm.serving.app import Loop, _local_replicas
from kvrecall.processes.ports import free_port
from kvrecall.server import connections
from kvrecall.testing import wait_until


def test_connections_that_begin_no_handshake_are_counted_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST_WAITING", 20)
    monkeypatch.setattr(connections, "_SILENCE_S", 3.0)
    cert, key, _ = Authority(tmp_path, "authority").issue("server")
    own: Any = {"port": free_port(), "http": connections.PromptProtocol}
    app = Starlette(routes=[Route("/health", lambda _: PlainTextResponse("well"))])
    server = uvicorn.Server(uvicorn.Config(app, ssl_certfile=cert, ssl_keyfile=key, **own))
    thread = threading.Thread(target=lambda: uvloop.run(server.serve(), loop_factory=Loop))
    thread.start()
    wait_until(lambda: server.started)
    place = ("127.0.0.1", own["port"])
    context = ssl.create_default_context(cafile=tmp_path / "authority.pem")
    with contextlib.ExitStack() as kept, httpx.Client(verify=context) as client:
        links = [kept.enter_context(socket.create_connection(place)) for _ in range(50)]
        url = f"https://127.0.0.1:{own['port']}/health"
        assert client.get(url).text == "well", "the youngest of too many"
        for number, link in enumerate(links):
            link.settimeout(1 if number < 28 else 30)  # less than silence takes
            assert link.recv(1) == b""
        assert client.get(url).text == "well"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("given", "replicas"),
    [
        ({"size": 2}, 2),
        ({"size": 4, "size_local": 2}, 2),
        ({"size": 2, "size_local": 1}, 1),
        ({"size": 2, "rank": 1}, 1),
        ({"size": 2, "rank": 0}, 1),
        ({"size": 2, "external_lb": True}, 1),
    ],
)
def test_only_replicas_of_this_server_need_a_service(given: dict[str, Any], replicas: int) -> None:
    """With a rank of its own, a server has one replica; the others are servers of their own."""
    unset = {"size": 1, "size_local": None, "rank": None, "external_lb": False}
    args = {f"data_parallel_{name}": value for name, value in (unset | given).items()}
    assert _local_replicas(Namespace(**args)) == replicas
