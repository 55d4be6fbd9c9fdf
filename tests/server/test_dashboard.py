"""The dashboard in a real browser on a real server, and its parts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from support.clocks import ManualClock

from kvrecall.engines.base import Phase, RequestView
from kvrecall.engines.parting import ADVICE
from kvrecall.processes.ports import free_port
from kvrecall.server.dashboard import history, routes
from kvrecall.server.dashboard.routes import dashboard_router
from kvrecall.testing import wait_until
from server.fake import INFO, FakeEngine
from server.live import LiveServer, browsing, serving

TEXT = "A long text that retrieval has something to choose from. " * 40  # 2,280 tokens
LAYERS = 4


def test_samples_are_read_from_the_metrics_and_bounded() -> None:
    registry = CollectorRegistry()
    tokens = Counter("kvrecall_prompt_tokens", "x", ["engine", "source"], registry=registry)
    loaded = Counter("kvrecall_loaded_blocks", "x", ["engine", "group"], registry=registry)
    loaded.labels("0", "full").inc(4)
    loaded.labels("1", "window").inc(2)
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
    assert everything[0].loaded == {"full": 4.0, "window": 2.0}
    assert [each.at for each in kept.since(everything[-3].at)] == [e.at for e in everything[-2:]]


def test_what_was_missed_is_known_for_a_day() -> None:
    registry = CollectorRegistry()
    missed = Counter("kvrecall_missed_tokens", "x", ["reason"], registry=registry)
    clock = ManualClock()
    kept = history.History(registry, clock)
    assert kept.day()[1] == {}
    began = clock()
    missed.labels("new").inc(100)
    kept.take()
    for hours in range(1, 31):
        clock.advance(3600.0)
        missed.labels("new").inc(10)
        kept.take()
        since, before = kept.day()
        assert since == began + 3600 * max(0, hours - 24)
        assert before == {"new": 100.0 + 10 * max(0, hours - 24)}
    for _ in range(2000):
        clock.advance(2.0)
        kept.take()
    assert len(kept._day) <= history.DAY_S / 600 + 2


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


def test_a_pool_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.info = dataclasses.replace(INFO, pooled=True, pool_socket=tmp_path / "nothing.sock")
    monkeypatch.setattr(routes, "_FRESH_S", 0.0)
    monkeypatch.setattr(routes, "_SHARE", 1e9)
    app = FastAPI()
    app.include_router(dashboard_router(engine))
    with TestClient(app) as client:
        assert client.get("/dashboard/data.json").json()["pool_away"] == ""
        assert "does not answer" in client.get("/dashboard/tree.json").json()["empty"]
        assert "nothing.sock" in client.get("/dashboard/data.json").json()["pool_away"]


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
        assert (told["pool_away"], told["ended"], told["live"]) == ("", [], [])
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


# ---- in a browser, without an engine ------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[str]:
    """The address of a dashboard whose engine's pool service is away, and two of whose requests
    left known prompts."""
    engine = FakeEngine()
    for tokens in (700, 800):
        miss = {"reason": "diverged", "from": 0, "tokens": tokens, "token": 25, "cause": "clock"}
        view = RequestView(f"r-{tokens}", Phase.DONE, 1.0, 2.0, tokens, 1, 0.1, {}, miss)
        engine.insight.known.append(view)
    engine.info = dataclasses.replace(INFO, pooled=True, pool_socket=tmp_path / "nothing.sock")
    app = FastAPI()
    app.include_router(dashboard_router(engine))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pool_that_is_away_cannot_be_overlooked(browser: Any, faulty: str, scheme: str) -> None:
    page = Page(browser, faulty, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    tab = page.tab
    band = tab.locator("#trouble[role=alert]:not(:empty)")
    band.wait_for()
    assert "The pool does not answer: no pool service at" in band.inner_text()
    assert tab.evaluate(SPREAD) < 8, "the header's controls are in one row"
    assert tab.title().startswith("(!) ")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.faint() == []
    assert band.bounding_box()["y"] < tab.locator("#tiles").bounding_box()["y"]
    assert page.wrong == []
    tab.close()


@pytest.mark.long
@pytest.mark.parametrize("width", [400, 1280])
def test_labels_of_time_do_not_overlap(browser: Any, faulty: str, width: int) -> None:
    page = Page(browser, faulty, viewport={"width": width, "height": 800})
    page.tab.wait_for_selector("#tpot .note")
    drawn = page.tab.evaluate(OVERLAPS)
    assert len(drawn) == 8
    for seconds, labels, overlaps in drawn:
        assert labels >= 2, seconds
        assert overlaps == 0, seconds
    page.tab.close()


@pytest.mark.long
def test_before_there_are_figures(browser: Any, faulty: str) -> None:
    """No card is empty or shows a zero that was not measured."""
    page = Page(browser, faulty)
    page.tab.wait_for_selector("#tree .note")
    for name in ("recall", "ttft", "tpot", "output", "queue", "load", "heat", "requests", "tree"):
        said = page.tab.inner_text(f"#{name}")
        assert said.endswith((".", "table")), f"{name}: {said}"
        assert "Loading" not in said
    tiles = page.tab.inner_text("#tiles")
    assert "NaN" not in tiles
    assert "undefined" not in tiles
    assert re.search(r"Time to first token, p50\s+–\s+p95 –", tiles)
    page.tab.close()


@pytest.mark.long
def test_what_costs_most_tokens_is_first(browser: Any, faulty: str) -> None:
    missed = Counter("kvrecall_missed_tokens", "x", ["engine", "reason"])
    try:
        page = Page(browser, faulty)
        tab = page.tab
        box = tab.query_selector("#missed")
        tab.wait_for_function("(e) => e.innerText.startsWith('No prompt of the last ')", arg=box)
        for engine, reason, tokens in (("0", "new", 300), ("0", "evicted", 900), ("1", "new", 200)):
            missed.labels(engine, reason).inc(tokens)
        tab.wait_for_selector("#missed tbody tr:nth-child(2)")
        rows = [
            row.locator("th, td").all_inner_texts() for row in tab.locator("#missed tbody tr").all()
        ]
        assert [row[:4] for row in rows] == [
            ["evicted", "900", "64 %", "900"], ["new", "500", "36 %", "500"]
        ]  # fmt: skip
        assert rows[0][4].strip() == "its block was evicted, dropped or cleared"
        (place,) = tab.locator("#partings tbody tr").all()
        told = place.locator("th, td").all_inner_texts()
        assert told == ["25", "1,500", "2", "r-800", ADVICE["clock"]]
        assert tab.inner_text("#missed-note").startswith("1,400 tokens in the last ")
        missed.labels("1", "new").inc(1000)
        tab.wait_for_function("(e) => e.querySelector('tbody th').innerText === 'new'", arg=box)
        assert page.wrong == []
        tab.close()
    finally:
        REGISTRY.unregister(missed)


# ---- live --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("dashboard")
    disk = ["--disk-path", str(folder / "disk"), "--disk-size", "64MiB", "--no-async-write"]
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
    with serving(folder, disk, layers=LAYERS, environment=retrieval) as live:
        for prompt, salt in ((TEXT, None), (TEXT + "Again.", None), (TEXT, "a tenant")):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
            body |= {"ignore_eos": True, **({"cache_salt": salt} if salt else {})}
            assert live.client.post("/v1/completions", json=body).status_code == 200
            live.client.post("/reset_prefix_cache")
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as chromium:
        yield chromium


class Page:
    """The dashboard in a tab; what went wrong in it, and what it asked for, is kept."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.tab = browser.new_page(**context)
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on(
            "console", lambda said: said.type == "error" and self.wrong.append(str(said.text))
        )
        self.tab.on("request", lambda request: self.asked.add(request.url))
        self.tab.goto(f"{url}/dashboard")
        self.tab.wait_for_selector("#status[data-state=live]", timeout=60_000)

    def style(self, name: str) -> str:
        return str(self.tab.evaluate(f"getComputedStyle(document.body).{name}"))

    def faint(self) -> list[str]:
        """Texts whose contrast with what is behind them is below WCAG's 4.5."""
        found: list[str] = self.tab.evaluate(CONTRASTS)
        return found


def opened(browser: Any, server: LiveServer, **context: Any) -> Page:
    page = Page(browser, server.url, **context)
    page.tab.wait_for_selector("#recall svg", timeout=60_000)
    return page


SPREAD = """() => {
  const boxes = [...document.querySelectorAll('.controls > *')]
    .map((each) => each.getBoundingClientRect());
  const middles = boxes.filter((box) => box.height).map((box) => (box.top + box.bottom) / 2);
  return Math.max(...middles) - Math.min(...middles);
}"""

OVERLAPS = """async () => {
  const { plot } = await import('/dashboard/charts.js');
  const box = document.querySelector('#tpot'), scale = { format: String, tell: String, unit: 'x' };
  return [30, 90, 170, 250, 470, 700, 1200, 1800].map((span) => {
    const times = [...Array(20).keys()].map((i) => 36_000 + (i * span) / 19);
    const lines = [{ label: 'x', color: 'red', values: times.map(() => 1) }];
    plot(box, { times, from: times[0], to: times[19], lines, scale, label: 'x', caption: 'x' });
    const foot = [...box.querySelectorAll('text')].map((text) => text.getBoundingClientRect())
      .filter((at, i, all) => at.top === Math.max(...all.map((one) => one.top)));
    const sorted = foot.sort((a, b) => a.left - b.left);
    const over = sorted.filter((at, i) => i && at.left < sorted[i - 1].right);
    return [span, sorted.length, over.length];
  });
}"""

CONTRASTS = """() => {
  const parse = (text) => {
    const numbers = text.match(/[-\\d.]+(e-?\\d+)?/g).map(Number);
    const scale = text.startsWith('color(') ? 255 : 1;
    return [...numbers.slice(0, 3).map((n) => n * scale), numbers[3] ?? 1];
  };
  const over = (top, under) =>
    [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    if (!element) return [255, 255, 255, 1];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const light = (color) => color.slice(0, 3).map((n) => n / 255)
    .map((n) => n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4)
    .reduce((sum, n, i) => sum + n * [0.2126, 0.7152, 0.0722][i], 0);
  const texts = 'h1, h2, button, select, .tile *, .legend li, .chart text, .trouble, ' +
    '.status, .note, .facts, .muted, .row span, th, td, .pill, summary, footer span';
  return [...document.querySelectorAll(texts)].flatMap((element) => {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length) return [];
    const style = getComputedStyle(element);
    const back = behind(element instanceof SVGElement ? element.closest('div') : element);
    const ink = over(parse(element instanceof SVGElement ? style.fill : style.color), back);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    return ratio < 4.5 ? [`${element.outerHTML.slice(0, 80)}: ${ratio}`] : [];
  });
}"""


@pytest.mark.long
@pytest.mark.engine
def test_the_page_shows_what_happened(browser: Any, server: LiveServer) -> None:
    page = opened(browser, server, viewport={"width": 1280, "height": 900})
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
    assert tab.inner_text("#trouble") == ""
    assert re.search(r"host: 1 load, p50 [\d.]+ m?s, p95 [\d.]+ m?s", tab.inner_text("#load-facts"))
    page.tab.hover("#ttft circle >> nth=0")
    assert "first token after" in tab.inner_text("#tip")
    assert page.wrong == []
    assert all(url.startswith((server.url, "data:")) for url in page.asked), page.asked


@pytest.mark.long
@pytest.mark.engine
def test_every_number_has_its_unit(browser: Any, server: LiveServer) -> None:
    tab = opened(browser, server).tab
    tab.wait_for_selector("#load svg")
    tiles = {
        one.locator(".name").inner_text(): one.inner_text().replace("\n", " ")
        for one in tab.locator(".tile").all()
    }
    time = r"\d[\d.]*\sm?s"
    for name, pattern in {
        "Prompt tokens recalled": r"\d %.*\stokens$",
        "Time to first token, p50": rf"p50 {time} p95 {time}",
        "Time per output token, p50": rf"p50 {time} p95 {time}",
        "Output, last minute": r"[\d.]+ tokens/s prompts [\d.,]+\s(k )?tokens/s",
        "Requests, last minute": r"[\d.]+ requests/s 0 running · 0 waiting · 3 ended",
        "Preemptions": "0 requests in this window; 0 since the start",
    }.items():
        assert re.search(pattern, tiles[name]), tiles[name]
    charts = ("recall", "ttft", "tpot", "output", "queue", "load")
    units = [tab.text_content(f"#{name} .unit") for name in charts]
    assert [unit.split(",")[0] for unit in units] == [
        "prompt tokens/s",
        "time to first token",
        "time per output token",
        "output tokens/s",
        "requests",
        "time of a load",
    ]
    for name in ("ttft", "tpot", "load"):
        marks = tab.locator(f"#{name} svg text[text-anchor=end]").all_text_contents()
        assert sum(bool(re.fullmatch(r"[\d.]+ m?s", mark)) for mark in marks) >= 2, marks


@pytest.mark.long
@pytest.mark.engine
def test_a_reload_loses_nothing(browser: Any, server: LiveServer) -> None:
    """The half hour is kept by the server."""
    page = opened(browser, server)

    def totals() -> str:
        return str(page.tab.get_attribute("#recall svg", "aria-label")).partition("in all")[2]

    before, dots = totals(), page.tab.locator("#ttft circle").count()
    assert before
    page.tab.reload()
    page.tab.wait_for_selector("#recall svg")
    assert (totals(), page.tab.locator("#ttft circle").count()) == (before, dots)


@pytest.mark.long
@pytest.mark.engine
def test_light_dark_and_keys(browser: Any, server: LiveServer) -> None:
    light = opened(browser, server, color_scheme="light").style("backgroundColor")
    page = opened(browser, server, color_scheme="dark")
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
    page.tab.press("#output summary", "Enter")
    shown = page.tab.query_selector("#output svg")
    page.tab.wait_for_function("(old) => !old.isConnected", arg=shown)
    assert page.tab.locator("#output details[open] td").count() > 0, "closed by a redraw"
    assert page.tab.evaluate("document.activeElement.closest('#output')?.id") == "output"
    page.tab.click("#pause")
    assert "paused" in page.tab.inner_text("#status")
    assert page.wrong == []


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_have_contrast(browser: Any, server: LiveServer, scheme: str) -> None:
    page = opened(browser, server, color_scheme=scheme)
    page.tab.wait_for_selector("#tree .row.group")
    assert page.faint() == []


@pytest.mark.long
@pytest.mark.engine
def test_everything_has_a_name(browser: Any, server: LiveServer) -> None:
    """Buttons, drawings and meters, as a screen reader would hear them."""
    page = opened(browser, server)
    page.tab.wait_for_selector("#tree .row.group")
    nameless = page.tab.evaluate(
        "[...document.querySelectorAll('button, select, svg[role=img], [role=meter]')].filter("
        "(e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []


@pytest.mark.long
@pytest.mark.engine
def test_a_hybrid_model_is_shown_by_its_groups(browser: Any, tmp_path: Path) -> None:
    """2,280 tokens: of 17 blocks a hit needs all of full attention and the last two of each of
    the two groups of windows."""
    with serving(tmp_path, family="gemma3_text", layers=3, longest=4096) as live:
        for _ in range(2):
            body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0}
            assert live.client.post("/v1/completions", json=body).status_code == 200
            live.client.post("/reset_prefix_cache")
        page = opened(browser, live)
        page.tab.wait_for_selector("#tree .row.group")
        groups = page.tab.locator("#tree .row.group .label").all_inner_texts()
        kinds = re.findall(r"Gemma3ForCausalLM .*, KV group \d: (full|window)", "\n".join(groups))
        assert sorted(kinds) == ["full", "window", "window"]
        page.tab.wait_for_selector("#load svg")
        facts = page.tab.inner_text("#load-facts")
        blocks = facts.partition("B/s, blocks: ")[2].split(", ")
        assert sorted(blocks) == ["17 full", "4 window"], facts
        assert page.wrong == []
        page.tab.close()


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
def test_the_ten_costliest_partings_of_real_requests(browser: Any, server: LiveServer) -> None:
    """Of twelve places at which two requests each leave a known prompt. What they cost is in the
    replies."""
    draw = random.Random(7)
    cost: dict[tuple[int, str], list[int]] = {}
    last = {}
    for place in range(12):
        head = "".join(draw.choices("bcdfgh", k=150 + 10 * place))
        for turn in range(3):
            at = f"at 09:1{turn} " if place == 11 else "xyz"[turn]
            behind = "".join(draw.choices("aeiou", k=260 + 30 * place))  # whole blocks
            body = {"model": "tiny", "prompt": head + at + behind, "max_tokens": 1}
            reply = server.client.post("/v1/completions", json=body).json()
            missed = reply["usage"]["prompt_tokens_details"]["recall"].get("missed", {})
            if turn:
                assert missed["reason"] == "diverged"
                at_place = missed["token"], missed.get("cause", "")
                cost.setdefault(at_place, []).append(missed["tokens"])
                last[at_place] = f"{reply['id']}-0"
    assert len(cost) == 12
    most = sorted(cost, key=lambda one: -sum(cost[one]))[:10]
    assert {cause for _, cause in most} == {"clock", ""}
    page = Page(browser, server.url)
    page.tab.wait_for_selector("#partings tbody tr:nth-child(10)")
    rows = [
        each.locator("th, td").all_inner_texts()
        for each in page.tab.locator("#partings tbody tr").all()
    ]
    why = "kvrecall why says more of it"
    assert rows == [
        [f"{one[0]:,}", f"{sum(cost[one]):,}", "2", last[one], ADVICE.get(one[1], why)]
        for one in most
    ]
    assert page.wrong == []


@pytest.mark.long
@pytest.mark.engine
def test_a_server_whose_engine_dies(browser: Any, server: LiveServer) -> None:
    """The page reports it; running requests get an error or end; health checks fail until the
    server has exited, with a clear line."""
    page = opened(browser, server)
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
    assert "The server has not answered since" in page.tab.inner_text("#trouble")


def until_closed(lines: Iterator[str]) -> Iterator[str]:
    """Lines until the stream ends, properly or not."""
    with contextlib.suppress(httpx.TransportError):
        yield from lines
