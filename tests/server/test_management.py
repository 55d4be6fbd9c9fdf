"""The management and metrics planes over an engine in a given state, and where they are served."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvrecall.engines.base import (
    EngineLoad,
    Fault,
    GenerateError,
    Listener,
    Phase,
    RequestView,
    Role,
    ServeSpec,
)
from kvrecall.server.application import attach_all
from kvrecall.server.management import management_router
from kvrecall.server.metrics import MetricsVector, MindieMetrics
from kvrecall.server.plan import Plan, Plane
from kvrecall.server.replies import ReplyError
from server.fake import IDLE, FakeEngine, ask
from server.live import OWN

SPEC = ServeSpec("m", "127.0.0.1", 1, {})
APART = Plan(
    dataclasses.replace(
        SPEC,
        listeners=(Listener("management", "127.0.0.1", 2), Listener("metrics", "127.0.0.1", 3)),
    ),
    homes={Plane.MANAGEMENT: "management", Plane.METRICS: "metrics"},
)
TOGETHER = Plan(
    dataclasses.replace(SPEC, listeners=(Listener("management+metrics", "127.0.0.1", 2),)),
    homes={Plane.MANAGEMENT: "management+metrics", Plane.METRICS: "management+metrics"},
)


async def stop(client: httpx.AsyncClient, query: str = "") -> httpx.Response:
    return await client.post(f"/stopService{query}", headers=OWN)


def management(engine: FakeEngine) -> FastAPI:
    return attach_all(FastAPI(), engine, plan=APART)["management"]


HEALTH = ["/health", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"]


@pytest.mark.parametrize("path", [*HEALTH, "/v2/models/tiny/versions/1/ready", "/health/timed"])
def test_a_well_server(path: str) -> None:
    assert ask(management(FakeEngine()), path).status_code == 200


@pytest.mark.parametrize("path", HEALTH)
def test_a_dead_engine(path: str) -> None:
    engine = FakeEngine()
    engine.lives = False
    reply = ask(management(engine), path)
    assert (reply.status_code, reply.json()["error_type"]) == (503, "Service Unavailable")


@pytest.mark.parametrize(
    ("now", "status"),
    [
        ({}, 200),
        ({"running": 7, "unfinished": 7}, 200),
        ({"running": 8, "unfinished": 8}, 503),
        ({"running": 6, "waiting": 2, "unfinished": 8}, 503),
        ({"unfinished": 8}, 503),  # accepted, and not yet seen by the scheduler
        ({"running": 1, "waiting": 1, "unfinished": 2, "used_share": 0.99}, 503),
        ({"running": 1, "waiting": 0, "unfinished": 1, "used_share": 0.99}, 200),
    ],
)
def test_readiness_is_whether_a_request_would_wait(now: Any, status: int) -> None:
    engine = FakeEngine()
    engine.now = dataclasses.replace(IDLE, **now)
    assert ask(management(engine), "/v2/health/ready").status_code == status
    live = ask(management(engine), "/v2/health/live")
    assert live.status_code == 200
    assert (b"alive but busy" in live.content) == (status == 503)


def test_a_stopping_server_is_not_ready() -> None:
    engine = FakeEngine()
    engine.drain()
    assert ask(management(engine), "/v2/health/ready").status_code == 503
    assert ask(management(engine), "/health").status_code == 200


def test_stopping_is_answered_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = asyncio.Event()
    monkeypatch.setattr("kvrecall.server.management.os.kill", lambda *_: killed.set())
    engine = FakeEngine()
    engine.now = dataclasses.replace(IDLE, unfinished=1)

    async def run() -> int:
        transport = httpx.ASGITransport(management(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asking = [asyncio.create_task(stop(client)) for _ in range(2)]
            while not engine.draining:
                await asyncio.sleep(0.001)
            done, _ = await asyncio.wait(asking, timeout=0.2)
            assert not done
            assert not killed.is_set()
            engine.now = IDLE
            replies = [await each for each in asking]
            assert {reply.content for reply in replies} == {b""}
            await asyncio.wait_for(killed.wait(), 30)
            return replies[0].status_code

    assert asyncio.run(run()) == 200


def test_another_mode_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.server.management.os.kill", lambda *_: None)
    engine = FakeEngine()
    assert ask(management(engine), "/stopService?mode=force", "POST").status_code == 200
    assert (engine.draining, engine.ended) == (True, False)


@pytest.mark.parametrize(
    ("path", "status"),
    [("1", 200), ("600", 200), ("0", 422), ("601", 422), ("-1", 404), ("x", 404)],
)
def test_the_timed_probe(path: str, status: int) -> None:
    engine = FakeEngine()
    assert ask(management(engine), f"/health/timed-{path}").status_code == status
    if status == 200:
        assert ask(management(engine), f"/health/timed-{path}").json() == {"status": "healthy"}
        request = engine.requests[0]
        assert (request.sampling.max_tokens, request.timeout_s) == (1, int(path))


@pytest.mark.parametrize("works", [True, False])
def test_a_probe_that_had_to_wait(works: bool) -> None:
    """A server too busy for the probe is healthy if other requests progressed meanwhile."""
    steps = iter([1.0, 2.0 if works else 1.0])
    registry = CollectorRegistry()

    class Steps(MindieMetrics):
        def work_done(self) -> float:
            return next(steps)

    engine = FakeEngine(failure=GenerateError(Fault.TIMEOUT, "too long"))
    app = FastAPI()
    app.include_router(management_router(engine, APART, Steps("m", engine.load, registry.collect)))
    app.add_exception_handler(ReplyError, lambda _, error: error.response())  # type: ignore[attr-defined]
    assert ask(app, "/health/timed-1").status_code == (200 if works else 500)


def test_descriptions() -> None:
    app = management(FakeEngine())
    config = ask(app, "/v1/config").json()
    assert (config["modelName"], config["maxSeqLen"], config["kvPool"]) == ("tiny", 4096, None)
    info = ask(app, "/info").json()
    assert (info["model_id"], info["max_total_tokens"]) == ("tiny", 4096)
    assert (config["npuMemSize"], config["cpuMemSize"], config["maxOutputLen"]) == (-1, 0, 4096)
    assert info["models"][0]["model_id"] == "tiny"
    status = ask(app, "/v1/status").json()
    assert status["service"] == {
        "roleStatus": "RoleReady",
        "currentRole": "none",
        "draining": False,
    }
    resource = status["resource"]
    assert (resource["availSlotsNum"], resource["availBlockNum"]) == (8, 48)
    assert (resource["freeNpuBlockNums"], resource["totalNpuBlockNums"]) == (48, 64)
    assert status["linkStatus"] == {"peers": []}
    assert ask(app, "/v2/status").json()["resource"]["totalAvailNpuBlockNum"] == 48
    for path in ("/v2/models/tiny/getSlotCount", "/v2/models/tiny/versions/1/getSlotCount"):
        assert ask(app, path).json() == {
            "total_slots": 8,
            "free_slots": 8,
            "available_tokens_length": 48 * 128,
        }
    assert ask(app, "/v2/models/other/getSlotCount").status_code == 404


def test_sizes_are_told_in_gigabytes() -> None:
    recall = {"host_size": "3GiB"}
    options = {"kv-cache-memory-bytes": "2GiB"}
    plan = Plan(dataclasses.replace(SPEC, options=options, recall=recall, role=Role.PREFILL))
    app = FastAPI()
    attach_all(app, FakeEngine(), plan=plan)
    config = ask(app, "/v1/config").json()
    assert (config["npuMemSize"], config["cpuMemSize"]) == (2, 3)
    role = ask(app, "/v1/status").json()["service"]
    assert role == {"roleStatus": "RoleReady", "currentRole": "prefill", "draining": False}


BUSINESS = ["/generate", "/infer", "/v1/tokenizer", "/v2/models/tiny/generate", "/"]
OTHERS = {
    "management": [*HEALTH[1:], "/info", "/v1/config", "/v1/status", "/metrics-json"],
    "metrics": ["/metrics"],
}


@pytest.mark.parametrize("plan", [APART, TOGETHER], ids=["apart", "together"])
def test_planes_apart_serve_nothing_of_each_other(plan: Plan) -> None:
    app = FastAPI()
    apps = {"": app, **attach_all(app, FakeEngine(), plan=plan)}
    for path in BUSINESS:
        statuses = {name: ask(each, path, "POST").status_code for name, each in apps.items()}
        assert statuses.pop("") == 422  # served, and told that there is no body
        assert set(statuses.values()) == {404}
    for plane, paths in OTHERS.items():
        home = plan.home(Plane(plane))
        for path in paths:
            served = [name for name, each in apps.items() if ask(each, path).status_code == 200]
            assert served == [home], path
    assert {ask(each, "/health").status_code for each in apps.values()} == {200}


def test_planes_on_one_address() -> None:
    app = FastAPI()
    assert attach_all(app, FakeEngine(), plan=Plan(SPEC)) == {}
    for path in [path for paths in OTHERS.values() for path in paths]:
        assert ask(app, path).status_code == 200
    assert ask(app, "/generate", "POST").status_code == 422


def families() -> CollectorRegistry:
    """A few of vLLM's and the connector's metrics, of two engines."""
    registry = CollectorRegistry()
    labels = ("engine", "model_name")
    running = Gauge("vllm:num_requests_running", "", labels, registry=registry)
    tokens = Counter("vllm:prompt_tokens", "", labels, registry=registry)
    ended = Counter("vllm:request_success", "", (*labels, "finished_reason"), registry=registry)
    first = Histogram(
        "vllm:time_to_first_token_seconds", "", labels, registry=registry, buckets=(0.1, 1)
    )
    sources = Counter("kvrecall_prompt_tokens", "", (*labels, "source"), registry=registry)
    for engine in "01":
        running.labels(engine, "m").set(2)
        tokens.labels(engine, "m").inc(500)
        first.labels(engine, "m").observe(0.5)
        ended.labels(engine, "m", "stop").inc(3)
        sources.labels(engine, "m", "disk").inc(100)
        sources.labels(engine, "m", "device").inc(150)
        sources.labels(engine, "m", "computed").inc(250)
    ended.labels("0", "m", "abort").inc(2)
    return registry


def test_figures_under_mindies_names() -> None:
    load = EngineLoad(
        running=4,
        waiting=0,
        unfinished=4,
        max_running=8,
        blocks=64,
        used_share=0,
        prompt_throughput=120.5,
        generation_throughput=30,
    )
    told = samples(MindieMetrics("m", lambda: load, families().collect), load)
    assert told["num_requests_running"] == 4
    assert told["prompt_tokens_total"] == 1000
    assert told["avg_prompt_throughput_toks_per_s"] == 120.5
    assert told["avg_generation_throughput_toks_per_s"] == 30
    assert told["request_success_total"] == 6
    assert told["request_failed_total"] == 2
    assert told["request_received_total"] == 12
    assert told["failed_request_perc"] == 0.25
    assert told["npu_prefix_cache_hit_rate"] == 0.3
    rates = {tier: told[f"prefix_cache_hit_rate/{tier}"] for tier in ("device", "host", "disk")}
    assert rates == {"device": 0.3, "host": 0, "disk": 0.2}
    assert told["prefix_cache_hit_tokens_total/disk"] == 200
    assert told["time_to_first_token_seconds_count"] == 2
    assert told["time_to_first_token_seconds_sum"] == 1
    mindie = [told[name] for name in MINDIE]
    assert mindie == [500, 0, 0, 4, 64]


MINDIE = ["TTFT", "TBT", "waitingInferRequestNum", "processingInferRequestNum", "remainBlocks"]


def samples(figures: MindieMetrics, load: EngineLoad) -> dict[str, float]:
    """name -> value of a vector, ``name/tier`` where a sample has a tier; its form is checked."""
    told = MetricsVector(figures, lambda: load, "127.0.0.2:1026").body()
    assert told.pop("resultType") == "vector"
    result: Any = told.pop("result")
    assert not told
    assert [each["metric"][0]["__name__"] for each in result[:5]] == MINDIE
    found = {}
    for each in result:
        (labels,) = each["metric"]
        assert (labels["job"], labels["instance"]) == ("node", "127.0.0.2:1026")
        name = labels["__name__"]
        found[f"{name}/{labels['tier']}" if "tier" in labels else name] = float(each["value"])
    return found


def test_averages_are_of_the_last_requests() -> None:
    """A thousand slow requests are forgotten after a thousand quick ones."""
    registry = CollectorRegistry()
    name = "vllm:time_to_first_token_seconds"
    first = Histogram(name, "", registry=registry, buckets=(1,))
    vector = MetricsVector(MindieMetrics("m", lambda: IDLE, registry.collect), lambda: IDLE, "x")

    def average(seconds: float, count: int) -> str:
        for _ in range(count):
            first.observe(seconds)
        told: Any = vector.body()["result"]
        return str(told[0]["value"])

    assert average(1, 0) == "0"
    assert average(1, 1000) == "1000"
    assert average(0.5, 500) == "833"
    assert average(0.5, 500) == "500"
    assert average(0.25, 1000) == "250"


def test_the_metrics_page_is_one_prometheus_can_read() -> None:
    app = attach_all(FastAPI(), FakeEngine(), plan=APART)["metrics"]
    page = ask(app, "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    names = [family.name for family in text_string_to_metric_families(page.text)]
    assert len(names) == len(set(names))
    assert {"request_received", "npu_prefix_cache_hit_rate", "process_open_fds"} <= set(names)


def test_why_of_a_request() -> None:
    engine = FakeEngine()
    missed = {"reason": "evicted", "from": 128, "tokens": 72, "tier": "disk", "cause": "capacity"}
    split = {"device": 128, "computed": 72}
    engine.insight.known = [RequestView("one", Phase.DONE, 1.0, 2.0, 200, 8, 0.5, split, missed)]
    engine.insight.known += [RequestView("two", Phase.DONE, 1.0, 2.0, 200, 8, 0.5, split)]
    (told,) = ask(management(engine), "/why/one").json()["requests"]
    assert told["missed"] == missed
    assert told["why"] == (
        "72 tokens from token 128 on: its block was evicted, dropped or cleared; tier disk; "
        "cause capacity"
    )
    (told,) = ask(management(engine), "/why/two").json()["requests"]
    assert told["missed"] is None


@pytest.mark.parametrize("forgotten", [0.0, 86400.0])
def test_why_of_a_request_that_is_not_known(forgotten: float) -> None:
    engine = FakeEngine()
    engine.insight.forgotten_until = forgotten
    reply = ask(management(engine), "/why/three")
    assert reply.status_code == 404
    said = "it keeps all so far" if not forgotten else "1970-01-02 00:00:00 UTC are forgotten"
    assert said in reply.json()["error"]
