"""The parts of a check of one version: tests of this repository, in processes of that vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import EngineError
from kvrecall.processes.command import as_child

_OF_SERVE = (
    "the_start_is_told",
    "recall_from_every_tier",
    "metrics_endpoint",
    "the_split_survives_a_stop_string",
    "openai_usage",
    "openai_several",
    "a_client_that_leaves",
    "sigterm_lets_running_requests_end",
)

_OF_FIELDS = (
    "every_field_is_decided",
    "every_variable_is_decided",
    "every_configuration_is_known",
    "settings_of_other_versions_are_theirs_alone",
)

PARTS: Mapping[str, tuple[str, ...]] = {
    "connector": (
        "tests/engines/vllm/compat/test_compat.py",
        *(f"tests/engines/vllm/identity/test_fields.py::test_{name}" for name in _OF_FIELDS),
        "tests/engines/vllm/connector/test_groups.py",
        "tests/engines/vllm/identity/test_sleep.py",
        "lab/tests/test_streams.py",
        "tests/engines/vllm/connector/test_recall.py",
        "tests/engines/vllm/connector/test_hybrid.py",
    ),
    "server": (
        *(f"tests/server/test_serve.py::test_{name}" for name in _OF_SERVE),
        "tests/engines/vllm/serving/test_vllm_serve.py",
        "tests/router/test_upstreams.py::test_every_route_of_vllm_is_passed_on_and_counted_or_refused_in_words",
    ),
    "retrieval": ("tests/engines/vllm/attention/test_engine.py",),
}
"""Their tests, which make real engines and servers: tokens and log-probabilities of a recalled
prompt equal those of a hit on the device, bit for bit."""

_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a part has shown. ``broken``: each test that failed, and its reason."""

    name: str
    passed: int
    skipped: int
    seconds: float
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.passed > 0 and not self.broken

    @property
    def text(self) -> str:
        lines = [] if self.holds else ["FAILED:", *(self.broken or ["no test ran"])]
        verdict = "\n  ".join(lines or ["ok"])
        return f"{self.name}: {self.passed} tests in {self.seconds:.0f} s: {verdict}"


def run_part(part: str, overlay: Path | None, folder: Path, name: str) -> Seen:
    """Runs a part's tests with the vLLM in ``overlay``, or the installed one. Their output goes to
    ``folder/NAME.log``, their models and pools to ``folder/engines/NAME``."""
    root = repository()
    report = folder / f"{name}.xml"
    (folder / "engines").mkdir(exist_ok=True)
    # The tests that are marked long are left out, as by `make test`.
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *PARTS[part]]
    words += ["--continue-on-collection-errors"]  # a module that is gone breaks its file alone
    environment = dict(os.environ)
    ours = [str(root / "src"), str(root / "lab"), os.getenv("PYTHONPATH", "")]
    paths = [*([str(overlay)] if overlay else []), *ours]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with (folder / f"{name}.log").open("wb") as log:
        try:
            subprocess.run(
                as_child(sys.executable, *words, f"--basetemp={folder / 'engines' / name}"),
                cwd=root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Seen(name, 0, 0, _LIMIT_S, (f"not done within {_LIMIT_S:.0f} s",))
    return read_report(report, name)


def read_report(report: Path, part: str = "") -> Seen:
    """What pytest's JUnit report says of a part."""
    if not report.is_file():
        return Seen(part, 0, 0, 0.0, ("pytest ended without a report; see the log",))
    suites = ElementTree.parse(report).getroot()
    passed, skipped, seconds, whys = 0, 0, 0.0, []
    for suite in suites.iter("testsuite"):
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            bad = [each for each in case if each.tag in ("failure", "error")]
            is_skipped = case.find("skipped") is not None
            skipped += is_skipped
            passed += not (bad or is_skipped)
            name = f"{case.get('classname')}::{case.get('name')}"
            whys += [f"{name}: {_reason(each)}" for each in bad]
    return Seen(part, passed, skipped, seconds, tuple(whys))


def _reason(bad: ElementTree.Element) -> str:
    lines = (bad.get("message") or bad.tag).splitlines()
    if lines == ["collection failure"]:
        lines = [one[1:].strip() for one in (bad.text or "").splitlines() if one.startswith("E ")]
    return next((line.strip() for line in lines if line.strip()), "")[:200]


def repository() -> Path:
    """The repository that this package is in. Raises EngineError for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests/engines/vllm").is_dir():
        raise EngineError("make compat runs the repository's tests; run it in a copy of it")
    return root
