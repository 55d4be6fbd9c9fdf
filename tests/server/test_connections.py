"""Pages in a real browser before a server with a key, and before one without: its own dashboard,
and those of others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from kvrecall.engines.base import ServeSpec
from kvrecall.processes.ports import free_port
from kvrecall.server.application import attach_all
from kvrecall.server.connections import PromptProtocol
from kvrecall.server.plan import Plan
from kvrecall.testing import wait_until
from server.fake import FakeEngine
from server.live import browsing

pytestmark = pytest.mark.long

PLAN = Plan(ServeSpec("m", "127.0.0.1", 1, {}))
KNOWS = {"http_credentials": {"username": "anyone", "password": "one"}}
ATTEMPTS = """async (url) => {
  const body = JSON.stringify({inputs: 'x'});
  const post = (path, more) => fetch(url + path, {method: 'POST', body, ...more})
    .then((reply) => reply.status, () => 'stopped');
  const image = (path) => new Promise((done) => {
    const made = new Image();
    made.onload = () => done('loaded');
    made.onerror = () => done('stopped');
    made.src = url + path;
  });
  const json = {'content-type': 'application/json'}, own = {'x-kvrecall': '1'};
  const all = {credentials: 'include'};
  return [
    await post('/generate', {mode: 'no-cors', ...all}),
    await post('/generate', {mode: 'no-cors', headers: {'content-type': 'text/plain'}, ...all}),
    await post('/generate', {headers: json, ...all}),
    await post('/generate', {headers: own, ...all}),
    await post('/stopService', {mode: 'no-cors', ...all}),
    await post('/stopService', {headers: own}),
    await fetch(url + '/dashboard/data.json', all).then((reply) => reply.status, () => 'stopped'),
    await image('/stopService'),
    await image('/stopService?mode=Force'),
    await image('/health/timed'),
  ];
}"""


@contextmanager
def running(app: ASGIApp) -> Iterator[int]:
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="warning", http=PromptProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield port
    finally:
        server.should_exit = True
        thread.join()


def served(engine: FakeEngine, *keys: str) -> FastAPI:
    app = FastAPI()
    attach_all(app, engine, keys, plan=PLAN)
    return app


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing("--host-resolver-rules=MAP rebound.example 127.0.0.1") as chromium:
        yield chromium


def test_the_dashboard_with_a_key(browser: Any) -> None:
    """The browser asks for it, and sends it with all that the page fetches."""
    with running(served(FakeEngine(), "one")) as port:
        tab = browser.new_page(**KNOWS)
        tab.goto(f"http://127.0.0.1:{port}/dashboard")
        tab.wait_for_selector("#status[data-state=live]")
        tab.close()


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_a_page_of_another_origin_reaches_nothing(browser: Any, keys: tuple[str, ...]) -> None:
    """Even in a browser that has the key of the dashboard."""
    engine, evil = FakeEngine(), FastAPI()
    evil.get("/")(lambda: HTMLResponse("<title>evil</title>"))
    with ExitStack() as held:
        port = held.enter_context(running(served(engine, *keys)))
        other = held.enter_context(running(evil))
        tab = browser.new_page(**KNOWS)
        tab.goto(f"http://127.0.0.1:{port}/dashboard")
        tab.wait_for_selector("#status[data-state=live]")
        for host in ("127.0.0.1", "localhost", "rebound.example"):
            tab.goto(f"http://{host}:{other}/")
            told = tab.evaluate(ATTEMPTS, f"http://127.0.0.1:{port}")
            # 0: sent without leave to read the answer, which the server's refusal was.
            assert set(told) <= {"stopped", 0}, json.dumps(told)
        tab.close()
    assert engine.requests == []
    assert (engine.draining, engine.ended) == (False, False)


def test_a_rebound_name_reads_nothing(browser: Any) -> None:
    """A page whose name its owner points at this server is of one origin with it, for a browser."""
    with running(served(FakeEngine())) as port:
        tab = browser.new_page()
        for path in ("/dashboard", "/v1/config", "/metrics"):
            assert tab.goto(f"http://rebound.example:{port}{path}").status == 403
        assert tab.goto(f"http://localhost:{port}/dashboard").status == 200
        tab.close()
