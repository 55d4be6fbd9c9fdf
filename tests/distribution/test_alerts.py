"""``deploy/alerts.yml``: rules over what the code exports, each with a section on its cure."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.pages import anchors

from distribution.test_deploy import DEPLOY, ROOT, SERVICES, binds
from kvrecall.events.subscriber import Subscriptions
from kvrecall.router.fleet import Fleet
from kvrecall.router.metrics import RouterMetrics

RULES = DEPLOY / "alerts.yml"
TESTS = DEPLOY / "alerts.test.yml"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
RECORDED = [rule for group in GROUPS for rule in group["rules"] if "record" in rule]
TAKEN = Path(sys.prefix) / "peers" / "prometheus"  # by scripts/setup
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=TAKEN)


def exported() -> set[str]:
    """Names of the series of engines and router. The engine's are read from the source, because
    importing vLLM takes longer than all other tests here."""
    tree = ast.parse((ROOT / "src/kvrecall/engines/vllm/connector/metrics.py").read_text())
    tables = {
        node.targets[0].id: {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Dict)
    }
    names = {f"{name}_total" for name in (*tables["COUNTERS"], "prompt_tokens")}
    names |= {f"tier_{name}_total" for name in tables["TIER_COUNTERS"]}
    names |= {*tables["POOL_GAUGES"], *(f"tier_{name}" for name in tables["TIER_GAUGES"])}
    page = RouterMetrics(Fleet([], [], 1), Subscriptions(lambda _: None)).page().decode()
    return {f"kvrecall_{name}" for name in names} | set(re.findall(r"^# TYPE (\w+)", page, re.M))


def named(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDED], ids=named)
def test_a_rule_reads_what_is_exported(rule: dict[str, Any]) -> None:
    known = exported() | {"up", "ALERTS"}
    expr = re.sub(r'"[^"]*"', "", rule["expr"])
    for own in RECORDED:
        expr = expr.replace(own["record"], "")
    used = set(re.findall(r"\b(?:kvrecall|vllm)\w*|\bup\b", expr))
    assert used or "instance:" in rule["expr"]
    assert used <= known


@pytest.mark.parametrize("page", ["operations.md", "troubleshooting.md"])
def test_a_metric_in_the_pages_is_exported(page: str) -> None:
    """Except those of retrieval, which the reference's test covers."""
    named = set(re.findall(r"\bkvrecall_\w*[a-z]\b(?!_)", (ROOT / "docs" / page).read_text()))
    assert named
    assert {name for name in named if "_retrieval_" not in name} - {"kvrecall_tier"} <= exported()


@pytest.mark.parametrize("rule", ALERTS, ids=named)
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors(ROOT / page)


def test_every_alert_is_tested() -> None:
    text = TESTS.read_text()
    assert not [name for rule in ALERTS if (name := named(rule)) not in text]


def test_the_containers_prometheus_reads_the_rules() -> None:
    mounted = binds(SERVICES["prometheus"])
    config = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"].read_text())
    assert [mounted[path] for path in config["rule_files"]] == [RULES]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool; scripts/setup brings it")
def test_prometheus_takes_the_rules_and_they_fire() -> None:
    for words in (("check", "rules", RULES), ("test", "rules", TESTS)):
        done = subprocess.run([str(PROMTOOL), *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
