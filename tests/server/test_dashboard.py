"""The dashboard in a real browser on a real server, and what it is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from support.clocks import ManualClock

from kvrecall.lab.ports import free_port
from kvrecall.server.dashboard import cached_prefixes, history
from kvrecall.server.dashboard.alarms import Alarms
from kvrecall.server.dashboard.routes import dashboard_router
from kvrecall.server.dashboard.sample import Sample

from .browser import browsing
from .fake import INFO, FakeEngine
from .live import LiveServer

GRAFANA = Path(__file__).parents[2] / "examples" / "grafana.json"
TEXT = "A long text that retrieval has something to choose from. " * 40  # 2,280 tokens
LAYERS = 4


def test_samples_are_read_from_the_metrics_and_bounded() -> None:
    registry = CollectorRegistry()
    tokens = Counter("kvrecall_prompt_tokens", "x", ["engine", "source"], registry=registry)
    used = Gauge("kvrecall_tier_used_bytes", "x", ["tier"], registry=registry)
    Counter("kvrecall_retrieval_steps", "x", registry=registry).inc(3)
    Counter("kvrecall_unrelated", "x", registry=registry).inc(3)
    tokens.labels("0", "host").inc(128)
    tokens.labels("1", "host").inc(128)
    used.labels("disk").set(5)
    clock = ManualClock()
    kept = history.History(registry, clock)
    for _ in range(history.KEPT + 5):
        kept.take()
        clock.advance(2.0)
    everything = kept.since(0.0)
    assert len(everything) == history.KEPT
    assert everything[0].tokens == {"host": 256.0}
    assert everything[0].tiers == {"disk": {"used_bytes": 5.0}, "device": {"share": 0.0}}
    assert everything[0].retrieval == {"steps": 3.0}
    assert [each.at for each in kept.since(everything[-3].at)] == [e.at for e in everything[-2:]]


def test_a_histogram_is_kept_where_it_changed_and_whole_in_the_oldest_sample() -> None:
    registry = CollectorRegistry()
    name = "kvrecall_load_latency_seconds"
    loads = Histogram(name, "x", ["engine", "tier"], registry=registry, buckets=(0.1, 1.0))
    clock = ManualClock()
    kept = history.History(registry, clock)
    for engine in ("0", "1"):
        loads.labels(engine, "disk").observe(0.05)
    for _ in range(history.KEPT):
        kept.take()
        clock.advance(2.0)
    assert kept.bounds == {"load:disk": [0.1, 1.0, None]}
    samples = kept.since(0.0)
    assert samples[0].buckets == {"load:disk": [2, 2, 2]}
    assert all(not each.buckets for each in samples[1:]), "what did not change is not sent again"
    loads.labels("0", "disk").observe(7.0)
    kept.take()
    samples = kept.since(0.0)
    assert len(samples) == history.KEPT
    assert samples[0].buckets == {"load:disk": [2, 2, 2]}, "handed on by the one that was forgotten"
    assert samples[-1].buckets == {"load:disk": [2, 2, 3]}


def test_a_counter_that_grows_is_an_alarm_for_as_long_as_it_is_kept() -> None:
    alarms = Alarms(kept_s=100.0)

    def told(at: float) -> list[tuple[str, int | None, float, float]]:
        return [(each.name, each.count, each.since, each.last) for each in alarms.active(at)]

    def see(at: float, corrupt: float, full: float = 0.0) -> None:
        alarms.see(Sample(at, tiers={"disk": {"corrupt": corrupt, "full": full}}))

    see(10.0, 0.0)
    assert told(10.0) == []
    see(20.0, 2.0)
    see(60.0, 5.0, full=1.0)
    see(80.0, 5.0, full=1.0)
    assert told(80.0) == [
        ("KvrecallDiskFull", None, 60.0, 80.0),
        ("KvrecallCorruptBlocks", 5, 20.0, 60.0),
    ]
    see(90.0, 5.0)
    assert told(90.0) == [("KvrecallCorruptBlocks", 5, 20.0, 60.0)], "a state that ended"
    assert told(161.0) == []
    see(170.0, 6.0)
    assert told(170.0) == [("KvrecallCorruptBlocks", 1, 170.0, 170.0)], "a new one"


def test_warnings_come_after_errors_and_a_failed_audit_stays() -> None:
    alarms = Alarms(kept_s=100.0)
    counts = Sample(0.0).counts | {"audits_failed": 1.0}
    alarms.see(Sample(10.0, counts=counts))
    alarms.see(Sample(20.0, tiers={"host": {"dropped": 3.0}}, counts=counts))
    names = [(each.name, str(each.severity)) for each in alarms.active(20.0)]
    assert names == [("KvrecallAuditFailed", "error"), ("KvrecallWritesDropped", "warning")]
    (audit,) = alarms.active(1e6)
    assert (audit.name, audit.since) == ("KvrecallAuditFailed", 10.0)


def test_a_pool_that_does_not_answer_and_an_engine_that_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine()
    engine.info = dataclasses.replace(INFO, pooled=True, pool_socket=tmp_path / "nothing.sock")
    monkeypatch.setattr(cached_prefixes, "_FRESH_S", 0.0)
    monkeypatch.setattr(cached_prefixes, "_SHARE", 1e9)
    app = FastAPI()
    app.include_router(dashboard_router(engine))
    with TestClient(app) as client:

        def told() -> dict[str, str]:
            found = client.get("/dashboard/data.json").json()["alarms"]
            assert all(each["cure"] and each["since"] <= each["last"] for each in found)
            return {each["name"]: each["detail"] for each in found}

        assert told() == {}
        assert "does not answer" in client.get("/dashboard/tree.json").json()["empty"]
        assert "nothing.sock" in told()["KvrecallPoolAway"]
        engine.lives = False
        assert list(told()) == ["KvrecallEngineDown"], "of which the other one follows"


def test_files_and_figures_without_an_engine() -> None:
    app = FastAPI()
    app.include_router(dashboard_router(FakeEngine()))
    with TestClient(app) as client:
        page = client.get("/dashboard")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text):
            assert client.get(f"/{name}").status_code == 200, name
        assert client.get("/dashboard/../cli.py").status_code == 404
        assert client.get("/dashboard/nothing.js").status_code == 404
        told = client.get("/dashboard/data.json").json()
        assert (told["pool"], told["heat"], told["live_total"]) == (False, None, 0)
        assert (told["alarms"], told["ended"], told["live"]) == ([], [], [])
        assert told["sample"]["counts"]["preemptions"] >= 0
        assert told["kept_samples"] * told["every_s"] == 1800, "half an hour"
        assert client.get("/dashboard/data.json?since=soon").status_code == 422
        tree = client.get("/dashboard/tree.json").json()
        assert (tree["roots"], tree["empty"]) == ([], "This server runs without a pool.")


def test_nothing_is_fetched_from_elsewhere() -> None:
    folder = Path(history.__file__).with_name("static")
    for file in folder.iterdir():
        links = re.findall(r"https?://[^\s\"'<>]+", file.read_text())
        assert set(links) <= {"http://www.w3.org/2000/svg"}, file.name


# ---- live --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    from kvrecall.lab.models import write_model

    folder = tmp_path_factory.mktemp("dashboard")
    write_model(folder / "model", "qwen3", hidden=64, layers=LAYERS, max_position=16384)
    port = free_port()
    words = [str(folder / "model"), "--port", str(port), "--served-model-name", "tiny"]
    words += ["--host-size", "32MiB", "--disk-path", str(folder / "disk"), "--disk-size", "64MiB"]
    words += ["--kv-cache-memory-bytes", "64MiB", "--no-async-write", "--", "--max-num-seqs", "8"]
    retrieval = {
        "VLLM_PLUGINS": "retrieval",
        "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "128",
        "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "256",
        "VLLM_RETRIEVAL_TOPK_PERCENT": "0.3",
        "VLLM_RETRIEVAL_DENSE_BOUNDARY": "1024",
        "VLLM_RETRIEVAL_GATE": "0",
        "VLLM_RETRIEVAL_LEAST_BLOCKS": "1",
        "VLLM_RETRIEVAL_DENSE_LAYERS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in retrieval.items():
            patch.setenv(name, value)
        live = LiveServer(folder, words, f"http://127.0.0.1:{port}", warm=True)
    try:
        live.wait_ready()
        for prompt, salt in ((TEXT, None), (TEXT + "Again.", None), (TEXT, "a tenant")):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
            body |= {"ignore_eos": True, **({"cache_salt": salt} if salt else {})}
            assert live.client.post("/v1/completions", json=body).status_code == 200
            live.client.post("/reset_prefix_cache")
        yield live
    finally:
        live.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as chromium:
        yield chromium


class Page:
    """The dashboard in a tab; what went wrong in it, and what it asked for, is kept."""

    def __init__(self, browser: Any, server: LiveServer, **context: Any) -> None:
        self.tab = browser.new_page(**context)
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on(
            "console", lambda said: said.type == "error" and self.wrong.append(str(said.text))
        )
        self.tab.on("request", lambda request: self.asked.add(request.url))
        self.tab.goto(f"{server.url}/dashboard")
        self.tab.wait_for_selector("#status[data-state=live]", timeout=60_000)
        self.tab.wait_for_selector("#recall svg", timeout=60_000)

    def style(self, name: str) -> str:
        return str(self.tab.evaluate(f"getComputedStyle(document.body).{name}"))


@pytest.mark.long
@pytest.mark.engine
def test_the_page_shows_what_happened(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server, viewport={"width": 1280, "height": 900})
    tab = page.tab
    assert tab.inner_text("#model") == "tiny"
    label = tab.get_attribute("#recall svg", "aria-label")
    assert re.search(r"device \d+, host [1-9][\d,]*, disk \d+, remote 0, computed [1-9]", label)
    assert tab.locator("#ttft circle").count() == 3
    assert tab.locator("#tiers .meter").count() == 3
    assert "32 MiB" in tab.inner_text("#tiers")
    tab.wait_for_selector("#tree .row.group")
    groups = tab.locator("#tree .row.group .label").all_inner_texts()
    assert "Qwen3ForCausalLM" in groups[0]
    assert any("no tenant" in text for text in groups)
    assert sum(text.startswith("tenant ") for text in groups) == 1
    assert tab.locator("#heat rect").count() == (LAYERS - 1) * 24 + 20
    assert tab.locator("#requests tbody tr").count() == 3
    assert "done" in tab.inner_text("#requests")
    page.tab.hover("#ttft circle >> nth=0")
    assert "first token after" in tab.inner_text("#tip")
    assert page.wrong == []
    assert all(url.startswith((server.url, "data:")) for url in page.asked), page.asked


@pytest.mark.long
@pytest.mark.engine
def test_light_dark_and_keys(browser: Any, server: LiveServer) -> None:
    light = Page(browser, server, color_scheme="light").style("backgroundColor")
    page = Page(browser, server, color_scheme="dark")
    dark = page.style("backgroundColor")
    assert light != dark
    for name, expected in (("Light", light), ("Dark", dark), ("Auto", dark)):
        page.tab.press("#theme", "Enter")
        assert page.tab.inner_text("#theme") == name
        assert page.style("backgroundColor") == expected
    page.tab.wait_for_selector("#tree .twist")
    before = page.tab.locator("#tree li").count()
    page.tab.press("#tree .twist >> nth=0", "Enter")
    assert page.tab.locator("#tree li").count() < before
    assert page.tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.tab.click("#pause")
    assert "paused" in page.tab.inner_text("#status")
    assert page.wrong == []


@pytest.mark.long
@pytest.mark.engine
def test_small_screens_need_no_sideways_scrolling(browser: Any, server: LiveServer) -> None:
    page = Page(browser, server, viewport={"width": 390, "height": 800})
    wide = page.tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390


@pytest.mark.long
@pytest.mark.engine
def test_everything_has_a_name(browser: Any, server: LiveServer) -> None:
    """Buttons, drawings and meters, as a screen reader would hear them."""
    page = Page(browser, server)
    page.tab.wait_for_selector("#tree .row.group")
    nameless = page.tab.evaluate(
        "[...document.querySelectorAll('button, select, svg[role=img], [role=meter]')].filter("
        "(e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


@pytest.mark.long
@pytest.mark.engine
def test_polls_are_small_and_tell_only_what_is_new(server: LiveServer) -> None:
    first = server.client.get("/dashboard/data.json").json()
    assert len(first["ended"]) == 3
    assert all(set(each) >= {"id", "split", "ttft_s"} for each in first["ended"])
    assert TEXT[:20] not in json.dumps(first)
    since = f"since={first['samples'][-1]['at']}&ended_since={first['ended'][-1]['ended']}"
    again = server.client.get(f"/dashboard/data.json?{since}")
    assert again.json()["ended"] == []
    assert len(again.json()["samples"]) <= 3
    assert len(again.content) < 20_000


@pytest.mark.long
@pytest.mark.engine
def test_every_metric_of_the_grafana_dashboard_is_exported(server: LiveServer) -> None:
    page = server.client.get("/metrics").text
    exported = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    exported |= {f"{name}_bucket" for name in exported}
    dashboard = json.loads(GRAFANA.read_text())
    asked = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    names = set(re.findall(r"\b(?:kvrecall_|vllm:)\w+", asked))
    assert len(names) > 25
    assert names - exported == set()


@pytest.mark.long
@pytest.mark.engine
def test_a_server_whose_engine_dies(browser: Any, server: LiveServer) -> None:
    """The page says so; who was being answered is told or cut off, and waits no longer; until the
    server has ended, with a clear line, it is not well."""
    page = Page(browser, server)
    asked = {"inputs": "x", "parameters": {"max_new_tokens": 15_000, "ignore_eos": True}}
    with server.client.stream("POST", "/generate_stream", json=asked) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        server.engine_core().kill()
        told = list(until_closed(lines))
    last = json.loads(told[-1][6:]) if told else {}
    assert last.get("generated_text") is None
    assert last.get("error_type", "Generation Error") == "Generation Error"
    statuses = set()
    while server.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            statuses.add(server.client.get("/health", timeout=10).status_code)
    assert statuses <= {200, 503}  # 200 until the loss is seen
    assert server.wait_end() == 1
    assert "[kvrecall] the engine died" in server.log
    page.tab.wait_for_selector("#status[data-state=gone]", timeout=60_000)
    assert "no answer since" in page.tab.inner_text("#status")


def until_closed(lines: Iterator[str]) -> Iterator[str]:
    """Lines until the stream ends, properly or not."""
    with contextlib.suppress(httpx.TransportError):
        yield from lines
