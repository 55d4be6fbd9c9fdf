"""One trace through a router, a prefill and a decode instance over a pool service, all real."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pool.service.service import MIB, Service
from server.live import LiveServer
from support.collector import Span, Spans, by_http
from support.commands import ran

from kvrecall.processes.ports import free_port
from router.cluster import Router, instance, tiny

BLOCK = 128
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 27
BLOCKS = len(TEXT) // BLOCK
CLIENT = "00f067aa0ba902b7"
CLIENT_KIND = 3


def traceparent(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CLIENT}-0{int(sampled)}"}


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Router, LiveServer, Spans]]:
    folder = tmp_path_factory.mktemp("traced")
    model = tiny(folder, 16384)
    with ExitStack() as stack:
        variables = stack.enter_context(pytest.MonkeyPatch.context())
        variables.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        endpoint, spans = stack.enter_context(by_http())
        option = ["--otlp-traces-endpoint", endpoint]
        service = stack.enter_context(Service(folder / "pool", 128 * MIB))
        servers = {}
        for role in ("prefill", "decode"):
            home = folder / role
            servers[role] = instance(home, model, role, free_port(), service.socket, 0, option)
            stack.callback(servers[role].close)
        for server in servers.values():
            server.wait_ready()
        urls = ["--prefill", servers["prefill"].url, "--decode", servers["decode"].url]
        router = Router(folder, [*urls, *option])
        stack.callback(router.close)
        yield router, servers["decode"], spans


def ended(spans: Spans, trace: str, requests: int) -> list[Span]:
    """The spans of a trace once those of so many requests to engines are there."""

    def count() -> int:
        return sum(span.name == "llm_request" for span in spans.of_trace(trace))

    spans.wait(lambda: count() == requests)
    names = ("kvrecall.request", "kvrecall.route")
    spans.wait(lambda: sum(s.name in names for s in spans.of_trace(trace)) >= requests)
    return spans.of_trace(trace)


def children(found: list[Span], parent: Span) -> dict[str, Span]:
    return {span.name: span for span in found if span.parent == parent.id}


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_through_router_and_roles(
    cluster: tuple[Router, LiveServer, Spans], stream: bool
) -> None:
    router, _, spans = cluster
    trace = ("a" if stream else "b") * 32
    body = {"model": "tiny", "prompt": f"{stream}. {TEXT}", "max_tokens": 4, "stream": stream}
    reply = router.client.post("/v1/completions", json=body, headers=traceparent(trace))
    assert reply.status_code == 200, reply.text
    spans.wait(lambda: any(span.name == "kvrecall.route" for span in spans.of_trace(trace)))
    found = ended(spans, trace, 2)
    (route,) = (span for span in found if span.parent == CLIENT)
    assert route.name == "kvrecall.route"
    assert route.attributes["http.response.status_code"] == 200
    calls = children(found, route)
    assert list(calls) == ["kvrecall.route.prefill", "kvrecall.route.decode"]
    first, then = calls.values()
    assert first.ended <= then.began
    for call in (first, then):
        below = children(found, call)
        assert set(below) == {"llm_request", "kvrecall.request"}
        assert call.began <= below["kvrecall.request"].began
    prefill = children(found, children(found, first)["kvrecall.request"])
    assert list(prefill)[:3] == ["kvrecall.queue", "kvrecall.lookup", "kvrecall.compute"]
    lookup = prefill["kvrecall.lookup"]
    (asked,) = (span for span in found if span.parent == lookup.id)
    assert (asked.name, asked.kind) == ("kvrecall.pool.find", CLIENT_KIND)
    decode = children(found, children(found, then)["kvrecall.request"])
    steps = ["queue", "lookup", "load", "copy", "compute"]
    names = [name for name in decode if name not in ("kvrecall.save", "kvrecall.wait")]
    assert names == [f"kvrecall.{step}" for step in steps]
    wait = decode["kvrecall.wait"]  # of no time, and in the look-up, if the blocks are there
    assert wait.attributes["kvrecall.wait.outcome"] == "kept"
    assert decode["kvrecall.queue"].ended <= wait.began <= decode["kvrecall.load"].began
    assert decode["kvrecall.load"].attributes["kvrecall.load.blocks"] == BLOCKS
    (acquired,) = (span for span in found if span.parent == decode["kvrecall.load"].id)
    assert acquired.name == "kvrecall.pool.acquire"
    order = [decode[f"kvrecall.{step}"] for step in steps]
    assert all(one.ended <= other.ended for one, other in itertools.pairwise(order))


@pytest.mark.long
@pytest.mark.engine
def test_other_routes_join_the_clients_trace(cluster: tuple[Router, LiveServer, Spans]) -> None:
    _, server, spans = cluster
    trace = "c" * 32
    body = {"inputs": f"By TGI's form. {TEXT}", "parameters": {"max_new_tokens": 2}}
    reply = server.client.post("/generate", json=body, headers=traceparent(trace))
    assert reply.status_code == 200, reply.text
    found = ended(spans, trace, 1)
    assert {s.name for s in found if s.parent == CLIENT} == {"kvrecall.request", "llm_request"}


@pytest.mark.long
@pytest.mark.engine
def test_without_a_clients_span_a_trace_begins(cluster: tuple[Router, LiveServer, Spans]) -> None:
    _, server, spans = cluster
    body = {"model": "tiny", "prompt": f"From nobody. {TEXT}", "max_tokens": 2}
    assert server.client.post("/v1/completions", json=body).status_code == 200

    def roots() -> list[Span]:
        return [span for span in spans.named("kvrecall.request") if span.parent == ""]

    spans.wait(lambda: bool(roots()))
    (root,) = roots()
    found = ended(spans, root.trace, 1)
    assert "llm_request" in children(found, root)


@pytest.mark.long
@pytest.mark.engine
def test_a_client_that_does_not_sample_is_not_traced(
    cluster: tuple[Router, LiveServer, Spans],
) -> None:
    router, _, spans = cluster
    body = {"model": "tiny", "prompt": f"Unseen. {TEXT}", "max_tokens": 2}
    unseen, seen = "d" * 32, "e" * 32
    headers = traceparent(unseen, sampled=False)
    assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    body["prompt"] = f"Seen. {TEXT}"
    headers = traceparent(seen)
    assert router.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    ended(spans, seen, 2)
    assert spans.of_trace(unseen) == []


@pytest.mark.parametrize(
    ("endpoint", "protocol", "why"),
    [
        ("http://127.0.0.1:4317", "udp", "allowed: grpc, http/protobuf"),
        ("nonsense", "grpc", "write the URL of an OTLP collector"),
        ("127.0.0.1:4318/v1/traces", "http/protobuf", "write the URL of an OTLP collector"),
    ],
)
@pytest.mark.parametrize(
    "command", ["router --decode http://127.0.0.1:1", "serve models/recall-tiny"]
)
def test_a_wrong_endpoint_is_refused(
    endpoint: str, protocol: str, why: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    words = [*command.split(), "--port", str(free_port()), "--otlp-traces-endpoint", endpoint]
    done = ran(sys.executable, "-m", "kvrecall", *words, timeout=120)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert repr(endpoint) in done.stderr
    assert len(done.stderr.splitlines()) <= 2, "one line; serve's first says what it serves"


def test_packages_are_missed_in_one_line() -> None:
    """And nothing of OpenTelemetry is imported without the option."""
    program = """
import sys
from kvrecall.router.application import application
from kvrecall.router.addresses import Roster
from kvrecall.router.router import RouterSettings
from kvrecall.traces import check_endpoint
given = {"--engine": (), "--prefill": (), "--decode": ["http://127.0.0.1:1"]}
application(RouterSettings(Roster(given, None), 0, 0, 0, 1, 1.0))
print(any(name.startswith("opentelemetry") for name in sys.modules))
sys.modules["opentelemetry"] = None
check_endpoint("http://127.0.0.1:4317")
"""
    done = ran(sys.executable, "-c", program)
    assert done.stdout == "False\n", done.stderr
    assert "ConfigError: --otlp-traces-endpoint is 'http://127.0.0.1:4317', and " in done.stderr
    assert done.stderr.rstrip().endswith("pip install 'kvrecall[traces]'")
