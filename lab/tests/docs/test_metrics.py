"""Every metric that the dashboard, Grafana, the alert rules or a page names is exported, by vLLM's
code or by ours, and has the labels that are asked of it."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvrecall.server.dashboard import history
from kvrecall_lab.reference.metrics import Family, pool_families, router_families

from .pages import ROOT

pytest.importorskip("vllm")

GRAFANA = ROOT / "examples" / "grafana.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
PAGE = Path(history.__file__).with_name("static") / "index.html"
DOCUMENTED = ROOT / "docs" / "dashboard.md"
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
NAME = r"(?:kvrecall_|vllm:)\w*[a-z]"
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def vllm_families() -> list[Family]:
    """What vLLM's loggers register, by the calls in their source; without labels. Counters of
    speculation are registered from a list of names and texts."""
    found = []
    for node in ast.walk(source_of("vllm.v1.metrics.loggers")):
        if not isinstance(node, ast.Call):
            continue
        kind = re.fullmatch(r"self\._(\w+)_cls", ast.unparse(node.func))
        for keyword in node.keywords if kind else ():
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                found.append(Family(str(keyword.value.value), kind[1] if kind else "", (), ""))
    assert len(found) > 30
    for node in ast.walk(source_of("vllm.v1.spec_decode.metrics")):
        match node:
            case ast.Tuple([ast.Constant(str(name)), ast.Constant()]) if name.startswith("vllm:"):
                found.append(Family(name, "counter", (), ""))
    return found


def source_of(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    return ast.parse(Path(spec.origin).read_text())


@pytest.fixture(scope="module")
def exported() -> dict[str, Family]:
    """By the names of their samples, as a query has them."""
    made = {}
    for one in [*pool_families(), *router_families(), *vllm_families()]:
        for ending in ENDINGS[one.kind]:
            made[one.name.removesuffix("_total") + ending] = one
    return made


def queries() -> Iterator[tuple[str, str]]:
    """Where, and the expression; what recording rules make is replaced by what they are made of."""
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        yield rule.get("alert") or rule["record"], rule["expr"]


def named(query: str) -> set[str]:
    """Its metrics; a recording rule's name begins with its level, instance:."""
    return set(re.findall(rf"(?<![\w:]){NAME}(?![\w:])", query))


def test_every_query_of_grafana_and_the_alert_rules_has_exported_metrics_and_their_labels(
    exported: dict[str, Family],
) -> None:
    seen = set()
    for where, query in queries():
        names = named(query)
        seen |= names
        assert names <= set(exported), where
        for name, selector in re.findall(rf"(?<![\w:])({NAME})\{{(.*?)\}}", query):
            asked = set(re.findall(r"(\w+)\s*[=!]~?", selector)) - SCRAPED
            assert name.startswith("vllm:") or asked <= set(exported[name].labels), (where, name)
        labels = {label for name in names for label in exported[name].labels} | SCRAPED | {"le"}
        for grouped in re.findall(r"\bby\s*\((.*?)\)", query):
            asked = {label.strip() for label in grouped.split(",")}
            of_vllm = any(name.startswith("vllm:") for name in names)
            assert of_vllm or asked <= labels, (where, grouped)
    assert len(seen) > 40


def test_what_the_dashboard_reads_is_exported(exported: dict[str, Family]) -> None:
    labels = {"kvrecall_prompt_tokens": "source", "kvrecall_load_latency_seconds": "tier"}
    for name in read():
        made = [exported[each] for each in history.NAMES if each in exported and is_of(each, name)]
        assert made, name
        label = labels.get(name, "tier" if name.startswith("kvrecall_tier_") else None)
        assert label is None or all(label in one.labels for one in made), name


def test_the_dashboards_page_names_the_metrics_it_reads_and_their_charts() -> None:
    """A row for each card and tile of the page: what it shows, its unit, its metrics."""
    page = DOCUMENTED.read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    by_title = {title: metrics for title, _, metrics in rows}
    assert all(unit.strip() for _, unit, _ in rows)
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", PAGE.read_text())
    assert len(titles) > 9
    assert set(titles) <= set(by_title), set(titles) - set(by_title)
    said = {name.removesuffix("_total") for name in re.findall(rf"`({NAME})`", page)}
    assert said == set(read())


def test_every_metric_of_vllm_that_is_named_anywhere_is_vllms(exported: dict[str, Family]) -> None:
    families = {one.name for one in exported.values()}
    places = [*(ROOT / "deploy").rglob("*.y*ml"), *ROOT.glob("*.md")]
    places += [*(ROOT / "src").rglob("*.py")]
    places += (ROOT / "docs").rglob("*.md")
    for place in places:
        for name in re.findall(r"\bvllm:[a-z]\w+", place.read_text()):
            assert name in families or name in exported, f"{place.relative_to(ROOT)}: {name}"


def read() -> list[str]:
    """The metrics that the dashboard reads, without endings."""
    endings = ("_total", "_bucket")
    return sorted({re.sub(f"({'|'.join(endings)})$", "", name) for name in history.NAMES})


def is_of(name: str, metric: str) -> bool:
    return name in (metric, metric + "_total", metric + "_bucket")
