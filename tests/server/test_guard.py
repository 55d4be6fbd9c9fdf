"""Who is let in to a server's routes. The attacks of ``kvrecall_lab.hostile.http`` try it on a real
one; here are the rules, each with what passes and what does not."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from kvrecall.engines.base import Listener, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.processes.ports import free_port
from kvrecall.server import guard
from kvrecall.server.application import attach_all
from kvrecall.server.plan import Plan, Plane
from kvrecall.testing import wait_until
from server.fake import FakeEngine

PLAN = Plan(ServeSpec("m", "127.0.0.1", 1, {}), allowed_hosts=("Gpu-7",))
KEY = {"authorization": "Bearer one"}
JSON = {"content-type": "application/json"}
BODY = json.dumps({"inputs": "x"})
PAGE = "https://chat.example"


@contextlib.asynccontextmanager
async def client_of(
    engine: FakeEngine,
    plan: Plan = PLAN,
    keys: tuple[str, ...] = (),
    plane: str = "",
    address: str = "127.0.0.1",
) -> AsyncIterator[httpx.AsyncClient]:
    """A client at ``address`` of a plane of a server."""
    app = FastAPI()
    apps = {"": app, **attach_all(app, engine, keys, [PAGE], plan=plan)}
    transport = httpx.ASGITransport(apps[plane], client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        yield client


def ask(
    method: str,
    path: str,
    headers: dict[str, str],
    keys: tuple[str, ...] = (),
    plan: Plan = PLAN,
    plane: str = "",
    client: str = "127.0.0.1",
    content: Any = None,
) -> httpx.Response:
    async def send() -> httpx.Response:
        async with client_of(FakeEngine(), plan, keys, plane, client) as http:
            return await http.request(method, path, headers=headers, content=content)

    return asyncio.run(send())


def basic(key: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'anyone:{key}'.encode()).decode()}"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {}, 200),
        ("GET", "/v2/health/ready", {}, 200),
        ("POST", "/health", JSON, 401),
        ("GET", "/health/timed", {}, 401),
        ("GET", "/metrics", {}, 401),
        ("GET", "/nowhere", {}, 401),
        ("OPTIONS", "/generate", {}, 401),
        ("POST", "/generate", JSON, 401),
        ("POST", "/generate", JSON | {"authorization": "Bearer on"}, 401),
        ("POST", "/generate", JSON | {"authorization": "one"}, 401),
        ("POST", "/generate", JSON | basic("one"), 401),
        ("POST", "/generate", JSON | KEY, 200),
        ("POST", "/generate", JSON | {"authorization": "bearer  two"}, 200),
        ("POST", "/generate", KEY | {"content-type": "text/plain"}, 200),
        ("GET", "/metrics", KEY, 200),
        ("GET", "/dashboard", {}, 401),
        ("GET", "/dashboard", basic("two"), 200),
        ("GET", "/dashboard/data.json", basic("three"), 401),
        ("GET", "/dashboard/data.json", basic("one"), 200),
        ("GET", "/v1/config", basic("one"), 401),
        ("POST", "/dashboard/data.json", JSON | basic("one"), 401),
        # With a key, names and origins do not matter.
        ("POST", "/generate", JSON | KEY | {"host": "any.example", "origin": "http://x"}, 200),
    ],
)
def test_keys(method: str, path: str, headers: dict[str, str], status: int) -> None:
    content = BODY if method == "POST" else None
    reply = ask(method, path, headers, keys=("one", "two"), content=content)
    assert reply.status_code == status, reply.text
    if status == 401:
        scheme = "Basic" if path.startswith("/dashboard") else "Bearer"
        assert reply.headers["www-authenticate"].startswith(scheme)


def test_two_hosts_are_none() -> None:
    """Another part of the server might believe the second."""
    hosts: Any = [("host", "localhost"), ("host", "evil.example")]
    assert ask("GET", "/metrics", hosts[:1]).status_code == 200
    for headers in (hosts, hosts[::-1], [*hosts[:1], *hosts[:1]]):
        assert ask("GET", "/metrics", headers).status_code == 403


@pytest.mark.parametrize(
    ("path", "status"),
    [("/metrics-json", 200), ("/metrics", 404), ("/metrics/", 404), ("/metricsx", 404)],
)
def test_metrics_on_another_address_close_no_path_of_management(path: str, status: int) -> None:
    spec = ServeSpec("m", "127.0.0.1", 1, {}, listeners=(Listener("metrics", "127.0.0.1", 2),))
    plan = Plan(spec, homes={Plane.METRICS: "metrics"})
    assert ask("GET", path, {}, plan=plan).status_code == status


def test_paths_are_those_that_routes_are_compared_with() -> None:
    """Also behind a prefix: what the guard opens and what the router serves is one path."""
    app = FastAPI(root_path="/api")
    access = guard.Access(keys=("one",), open_paths=("/health",))
    app.add_middleware(
        guard.Guard, access=access, refuse=lambda status, _: Response(status_code=status),
        max_body_bytes=1, max_requests=1, limit_name="",
    )  # fmt: skip

    @app.get("/{path:path}")
    async def served(path: str, request: Request) -> dict[str, object]:
        return {"path": path, "admitted": request.scope.get(guard.ADMITTED)}

    client = TestClient(app, base_url="http://localhost")
    assert client.get("/api/health").json() == {"path": "health", "admitted": False}
    assert client.get("/health").json() == {"path": "health", "admitted": False}
    assert client.get("/health", headers=KEY).json() == {"path": "health", "admitted": True}
    assert client.get("/apihealth", headers=KEY).json()["path"] == "apihealth"
    assert client.get("/apihealth").status_code == client.get("/api").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "192.0.2.9"}, 200),  # pages of an address are that address's
        ({"host": "gpu-7:8000"}, 200),
        ({"host": "localhost."}, 200),
        ({"host": "rebound.example:8000"}, 403),
        ({"host": "localhost.rebound.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": PAGE}, 200),
        ({"origin": f"{PAGE}.x"}, 403),
        ({"origin": "http://localhost:8001"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"host": "rebound.example", "origin": "http://rebound.example"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, 403),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
    ],
)
def test_hosts_and_origins(headers: dict[str, str], status: int) -> None:
    assert ask("POST", "/generate", JSON | headers, content=BODY).status_code == status


def test_a_link_to_the_dashboard_opens_it() -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask("GET", "/dashboard", followed).status_code == 200
    embedded = followed | {"sec-fetch-mode": "no-cors"}
    assert ask("GET", "/dashboard", embedded).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x/json"])
def test_what_a_page_may_send_unasked(kind: str) -> None:
    reply = ask("POST", "/generate", {"content-type": kind}, content=BODY)
    assert (reply.status_code, "X-Kvrecall: 1" in reply.text) == (415, True)
    assert ask("POST", "/stopService", {"content-type": kind}).status_code == 415
    own = {"content-type": kind, "x-kvrecall": "1"}
    assert ask("POST", "/generate", own, content=BODY).status_code == 200


def test_mindies_get_stops_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.server.management.os.kill", lambda *_: None)
    assert ask("GET", "/stopService", {}).status_code == 405
    allowed = dataclasses.replace(PLAN, stop_by_get=True)
    assert ask("GET", "/stopService", {}, plan=allowed).status_code == 200
    assert ask("GET", "/stopService", {"sec-fetch-site": "cross-site"}, plan=allowed).is_error
    assert ask("GET", "/stopService", {}, plan=allowed, keys=("one",)).status_code == 401


def apart(names: str = "management metrics", host: str = "127.0.0.1") -> Plan:
    listeners = tuple(Listener(name, host, n) for n, name in enumerate(names.split(), 2))
    homes = {Plane(plane): each.name for each in listeners for plane in each.name.split("+")}
    return dataclasses.replace(
        PLAN, spec=dataclasses.replace(PLAN.spec, listeners=listeners), homes=homes
    )


def test_metrics_need_no_key_on_a_plane_of_their_own() -> None:
    assert ask("GET", "/metrics", {}, ("one",), apart(), "metrics").status_code == 200
    assert ask("GET", "/info", {}, ("one",), apart(), "management").status_code == 401
    shared = apart("management+metrics")
    assert ask("GET", "/metrics", {}, ("one",), shared, "management+metrics").status_code == 401
    for plan in (apart(), shared):
        for plane in ("", *(each.name for each in plan.spec.listeners)):
            assert ask("GET", "/health", {}, ("one",), plan, plane).status_code == 200


@pytest.mark.parametrize("path", ["/dashboard", "/why/x", "/v1/config", "/nowhere"])
def test_other_hosts_need_a_key_for_prompts_and_settings(path: str) -> None:
    """Also where --allow-unauthenticated lets them generate."""
    plan = dataclasses.replace(PLAN, allow_unauthenticated=True)
    assert ask("GET", path, {}, plan=plan, client="192.0.2.9").status_code == 403
    assert ask("GET", path, KEY, ("one",), plan, client="192.0.2.9").status_code != 403
    assert ask("GET", path, {}, plan=plan, client="::1").status_code != 403
    for header in ("X-Forwarded-For", "Forwarded", "Via"):  # uvicorn may believe a stranger's
        assert ask("GET", path, {header: "127.0.0.1"}, plan=plan, client="::1").status_code == 403
    stop = ask("POST", "/stopService", JSON, plan=plan, client="192.0.2.9")
    assert stop.status_code == 403
    assert ask("POST", "/generate", JSON, plan=plan, client="192.0.2.9", content=BODY).is_success


@pytest.mark.parametrize(
    ("changes", "keys", "said"),
    [
        ({"host": "0.0.0.0"}, (), "the business plane is 0.0.0.0"),
        ({"host": "gpu-7"}, (), "the business plane is gpu-7"),
        ({"host": "0.0.0.0"}, ("one",), None),
        ({"host": "0.0.0.0", "tls": object()}, (), None),
        ({"host": "::1"}, (), None),
        ({"listeners": apart(host="0.0.0.0").spec.listeners}, (), "management plane is 0.0.0.0"),
        ({"listeners": apart("metrics", "0.0.0.0").spec.listeners}, (), None),
    ],
)
def test_what_other_hosts_reach_is_protected(changes: Any, keys: Any, said: str | None) -> None:
    plan = dataclasses.replace(PLAN, spec=dataclasses.replace(PLAN.spec, **changes))
    allowed = dataclasses.replace(plan, allow_unauthenticated=True)
    attach_all(FastAPI(), FakeEngine(), keys, plan=allowed)
    if said is None:
        attach_all(FastAPI(), FakeEngine(), keys, plan=plan)
    else:
        with pytest.raises(ConfigError, match=said):
            attach_all(FastAPI(), FakeEngine(), keys, plan=plan)


MANY = 20_000
IDS = [7] * MANY


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [{"role": "user", "content": "a"}] * MANY}, 413),
        ({"x": [[]] * MANY}, 413),
        ({"x": [1] * MANY}, 413),
        ({"x": "prompt", "y": IDS}, 413),
        ({"x": '"prompt": [1, 2', "y": IDS}, 413),
        ({"prompt": [*IDS, "a"]}, 413),
        ({"prompt": [IDS, *IDS]}, 413),
        ({"prompt": [1] * ((1 << 20) + MANY)}, 413),
        ({"inputs": 'a,[{"\\' * 50_000}, 200),
        ({"inputs": "x", "z": {"prompt": IDS}}, 422),  # read, and refused by the form
        ({"inputs": "x", "z": {"prompt": [IDS] * 9}}, 422),
    ],
)
@pytest.mark.parametrize("size", [1 << 16, 997])
def test_many_values_are_not_parsed(body: Any, status: int, size: int) -> None:
    """A parser would hold the event loop, ten microseconds for each that is wrong."""
    content = json.dumps(body).encode()

    async def pieces() -> Any:
        for start in range(0, len(content), size):
            yield content[start : start + size]

    parts = {"content-type": "multipart/form-data", "x-kvrecall": "1"}
    for headers in (JSON, {"content-type": "application/json; a=multipart/"}, parts):
        reply = ask("POST", "/generate", headers, content=pieces())
        assert reply.status_code == status, reply.text[:200]


def test_health_comes_between_large_bodies() -> None:
    """Each is parsed in one go, but not all of them in one."""
    large = json.dumps({"inputs": "x", "z": [1] * 5000})

    async def run() -> list[str]:
        ended: list[str] = []
        async with client_of(FakeEngine()) as client:

            async def post() -> None:
                await client.post("/generate", content=large, headers=JSON)
                ended.append("large")

            async def health() -> None:
                await client.get("/health")
                ended.append("health")

            await asyncio.gather(*(post() for _ in range(20)), health())
        return ended

    assert asyncio.run(run()).index("health") < 5


def test_texts_that_are_not_utf_8_are_not_parsed() -> None:
    """Python's parser reads UTF-16 and UTF-32, too, whose quotes are not found by counting."""
    for codec in ("utf-16", "utf-32"):
        assert ask("POST", "/generate", JSON, content=BODY.encode(codec)).status_code == 415
    sound = {"content-type": "multipart/form-data; boundary=b", "x-kvrecall": "1"}
    assert ask("POST", "/generate", sound, content=b"--b\r\n\r\n\0").status_code == 422


def test_a_body_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_SILENCE_S", 0.05)

    async def pieces() -> Any:
        yield b'{"inputs":'
        await asyncio.sleep(3600)

    reply = ask("POST", "/generate", JSON, content=pieces())
    assert (reply.status_code, reply.headers["connection"]) == (408, "close")


@pytest.mark.parametrize("says", [False, True])
def test_a_body_is_bounded_by_its_bytes_and_by_what_it_says(says: bool) -> None:
    """The rest is not waited for."""
    plan = dataclasses.replace(PLAN, max_body_bytes=1000)

    async def pieces() -> Any:
        yield b" " * (10 if says else 1001)
        await asyncio.sleep(3600)

    length = {"content-length": "1001"} if says else {}
    headers = JSON | {"expect": "100-continue"} | length
    reply = ask("POST", "/generate", headers, plan=plan, content=pieces())
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")


def test_large_bodies_on_their_way_are_bounded() -> None:
    """Together: the ninth of the largest size is refused before it has arrived."""
    plan = dataclasses.replace(PLAN, max_body_bytes=1000)

    async def run() -> list[int]:
        sent = asyncio.Event()

        async def pieces() -> Any:
            yield b" " * 990
            await sent.wait()
            yield b"{}"

        async with client_of(FakeEngine(), plan) as client:
            waiting = [
                asyncio.create_task(client.post("/generate", content=pieces(), headers=JSON))
                for _ in range(9)
            ]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            health = await client.get("/health")
            sent.set()
            replies = [await each for each in waiting]
            assert [each.result().status_code for each in done] == [503]
            return [health.status_code, *sorted(reply.status_code for reply in replies)]

    assert asyncio.run(run()) == [200, *[422] * 8, 503]


def test_requests_are_counted_and_not_connections() -> None:
    plan = dataclasses.replace(PLAN, max_links=2)

    async def run() -> list[int]:
        async with client_of(FakeEngine(delay=3600), plan) as client:
            asked = [
                asyncio.create_task(client.post("/generate", content=BODY, headers=JSON))
                for _ in range(3)
            ]
            done, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            health = await client.get("/health")
            for each in rest:
                each.cancel()
            return [health.status_code, *(each.result().status_code for each in done)]

    assert asyncio.run(run()) == [200, 503]

    async def one_after_the_other() -> set[int]:
        async with client_of(FakeEngine(), plan) as client:
            asked = [await client.post("/generate", content=BODY, headers=JSON) for _ in range(5)]
            return {each.status_code for each in asked}

    assert asyncio.run(one_after_the_other()) == {200}


def test_websockets_are_guarded() -> None:
    app = FastAPI()
    attach_all(app, FakeEngine(), ("one",), plan=PLAN)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    client = TestClient(app, base_url="http://localhost")
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        """Is never let in."""
    assert refused.value.code == 1008
    with client.websocket_connect("/v1/realtime", headers=KEY):
        """Is let in."""


_SERVER = """
import sys, uvicorn
from kvrecall.server import connections
connections._SILENCE_S = connections._KEPT_S = 2.0
async def app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})
uvicorn.run(app, port=int(sys.argv[1]), loop=sys.argv[2], lifespan="off", ws="none",
            timeout_keep_alive=0, log_level="critical", http=connections.PromptProtocol)
"""
ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_came_while_the_server_stood_still_is_read(loop: str) -> None:
    """Its timers are due by then: those of uvicorn, too, which ends a kept connection at once."""
    port = free_port()

    def connected() -> bool:
        with contextlib.suppress(ConnectionError):
            links.append(socket.create_connection(("127.0.0.1", port), 30))
        return bool(links)

    links: list[socket.socket] = []
    with subprocess.Popen([sys.executable, "-c", _SERVER, str(port), loop]) as server:
        try:
            wait_until(connected)
            connected()
            links[1].sendall(ASKED)  # the other has been accepted before, and has no request
            assert links[1].recv(99).startswith(b"HTTP/1.1 204")
            time.sleep(0.5)  # it waits for events then
            server.send_signal(signal.SIGSTOP)
            for link in links:
                link.sendall(ASKED)
            time.sleep(2.5)
            server.send_signal(signal.SIGCONT)
            assert [link.recv(12) for link in links] == [b"HTTP/1.1 204"] * 2
        finally:
            server.kill()
