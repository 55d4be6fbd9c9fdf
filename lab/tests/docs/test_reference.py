"""docs/reference follows the code: no page lags, and nothing in the code is missing there."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.environment import VARIABLES
from kvrecall.errors import ExitStatus
from kvrecall_lab.reference.declared import modules
from kvrecall_lab.reference.pages import COMMAND, PAGES, Page

from .pages import ROOT

DOCS = ROOT / "docs"
_METRIC = re.compile(r"\bkvrecall_[a-z_]*[a-z]\b(?!:)")  # with a colon: a recording rule
_FIELDS = set(
    "kvrecall_handover kvrecall_unit kvrecall_timeout kvrecall_best_of kvrecall_patch "
    "kvrecall_hint".split()
)


def in_code() -> Iterator[tuple[str, ast.AST]]:
    """What the product's modules are made of; contract suites are left out."""
    for module, tree in modules().items():
        if not module.startswith("testing"):
            yield from ((module, node) for node in ast.walk(tree))


def texts() -> Iterator[tuple[str, str]]:
    for module, node in in_code():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield module, node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_generated_page_is_as_the_code_says(page: Page, tmp_path: Path) -> None:
    if page.needs_engine:
        pytest.importorskip("vllm")
    docs = tmp_path / "docs"
    (docs / page.path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(DOCS / page.path, docs / page.path)
    assert not page.write(docs), f"docs/{page.path} is behind; run `{COMMAND}`"


def test_every_page_of_the_reference_is_generated_or_the_list_of_them() -> None:
    made = {page.path for page in PAGES} | {"reference/index.md"}
    found = {f"reference/{page.name}" for page in (DOCS / "reference").iterdir()}
    assert found <= made


def test_metrics_are_made_only_where_the_reference_looks_for_them() -> None:
    kinds = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
    makers = {
        module
        for module, node in in_code()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client")
        for name in node.names
        if name.name in kinds or name.name.endswith("MetricFamily")
    }
    assert makers == {"engines.vllm.connector.metrics", "router.metrics", "server.metrics"}


def test_a_metric_that_is_named_anywhere_is_in_the_reference() -> None:
    listed = set(_METRIC.findall((DOCS / "reference/metrics.md").read_text()))
    endings = ("_total", "_count", "_sum", "_bucket")
    known = listed | {name.removesuffix("_total") for name in listed}
    written = [*(ROOT / "deploy").rglob("*"), *(ROOT / "examples").rglob("*")]
    written += DOCS.rglob("*.md")
    named = {
        name: str(path.relative_to(ROOT))
        for path in [*written, *ROOT.glob("*.md")]
        if path.is_file() and path.suffix in (".md", ".json", ".yml", ".yaml")
        for name in _METRIC.findall(path.read_text())
    }
    named |= {name: module for module, text in texts() for name in _METRIC.findall(text)}
    unknown = {
        name: where
        for name, where in named.items()
        if name not in known
        and not any(name.removesuffix(each) in known for each in endings)
        and not any(one.startswith(f"{name}_") for one in known)
        and name not in _FIELDS
    }
    assert not unknown


def test_an_environment_variable_that_is_read_is_declared() -> None:
    """Reads by a name that stands in the code; declared ones are read by their declaration."""
    read: set[str] = set()
    for _, node in in_code():
        match node:
            case (
                ast.Subscript(value=base, slice=ast.Constant(value=str(name)), ctx=ast.Load())
                | ast.Call(
                    func=ast.Attribute(value=base, attr="get" | "setdefault" | "pop"),
                    args=[ast.Constant(value=str(name)), *_],
                )
                | ast.Compare(left=ast.Constant(value=str(name)), comparators=[base])
            ) if ast.unparse(base) in ("os.environ", "environ"):
                read.add(name)
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(value=name), *_]):
                read.add(str(name))
    assert read <= set(VARIABLES)


def test_a_variable_of_our_own_is_declared_once_wherever_it_is_named() -> None:
    ours = re.compile(r"\bKVRECALL_[A-Z_]+[A-Z]\b")
    said = [name for module, text in texts() if ours.fullmatch(text) for name in [text]]
    assert sorted(said) == sorted(name for name in VARIABLES if ours.fullmatch(name))
    assert len(set(VARIABLES)) == len(VARIABLES)


def test_a_header_of_our_own_is_in_the_reference() -> None:
    page = (DOCS / "reference/headers.md").read_text()
    named = {text for _, text in texts() if re.fullmatch(r"x-kvrecall[a-z-]*", text.lower())}
    assert len(named) > 1
    assert not {name for name in named if f"`{name}`" not in page}


def test_an_exit_code_is_in_the_reference() -> None:
    """Those that stand in the code as numbers."""
    ends = {"Exit", "exit", "_exit", "SystemExit"}
    used: set[int] = set()
    for _, node in in_code():
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ends:
            given = node.args[0] if node.args else ast.Constant(0)
            choices = [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]
            used |= {
                int(choice.value)
                for choice in choices
                if isinstance(choice, ast.Constant) and isinstance(choice.value, int)
            }
    assert used <= set(ExitStatus)
