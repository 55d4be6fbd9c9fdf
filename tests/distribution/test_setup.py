"""The steps of ``scripts/setup``: the packages each installs, and that it repairs an earlier, a
failed and an interrupted set-up.

A real set-up takes minutes and gigabytes; CI begins with it. Here a program replaces Python: it
makes an environment of two files, and records pip's arguments.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PYTHON = """#!/bin/bash
me=$(readlink -f "$0")
case "$1 $2" in
"-m venv")
  mkdir -p "$3/bin"
  cp "$me" "$3/bin/python"
  printf '#!%s/bin/python\\n' "$3" >"$3/bin/pip"
  exit ;;
"-m pip")
  shift 4
  echo "$*" >>{calls}
  [ ! -e {failing} ] || exit 1
  [[ "$*" != *torch==* ]] || touch "$(dirname "$me")/has-engine"
  exit ;;
"-m compileall") exit ;;
esac
case "$2" in
*_base_executable*) echo "$me" ;;
*m.distributions*) [ -e "$(dirname "$me")/has-engine" ] ;;
*vllm.platforms*) ;;
*) exec {python} -S -E "$@" ;;
esac
"""
ENGINE = ["upgrade pip", "engine"]
pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")


class Machine:
    """A checkout, and what pip was called with there."""

    def __init__(self, folder: Path) -> None:
        self.root, self._calls, self.failing = folder / "repo", folder / "calls", folder / "failing"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "scripts/setup"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = folder / "python3"
        self.python.write_text(
            _PYTHON.replace("{calls}", str(self._calls))
            .replace("{failing}", str(self.failing))
            .replace("{python}", sys.executable)
        )
        self.python.chmod(0o755)
        for tool in ("apt-get", "sudo", "chromium", "redis-server", "redis-check-rdb", "ip"):
            (folder / tool).write_text("#!/bin/sh\nexit 1\n")
            (folder / tool).chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": str(self.python),
            "KVRECALL_EXTRA": "cpu",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "setup"), *words],
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, *words: str, status: int = 0) -> list[str]:
        """What pip installs by it, in short."""
        self._calls.write_text("")
        process = self.start(*words)
        _, said = process.communicate(timeout=60)
        assert process.returncode == status, said
        return sorted(self.installed(), key=lambda call: call.startswith("--"))

    def installed(self) -> Sequence[str]:
        return [self._short(line) for line in self._calls.read_text().splitlines()]

    def _short(self, line: str) -> str:
        words = line.replace(str(self.root), "ROOT").split()
        if "--target" in words:
            return f"-- {words[words.index('--target') + 1].rpartition('/')[2]}"
        if words[:2] == ["--upgrade", "pip"]:
            return "upgrade pip"
        engine = ["engine"] if any(word.startswith("torch==") for word in words) else []
        extras = words[words.index("-e") + 1].removeprefix("ROOT").strip("[]")
        extras = extras.replace("objects,encryption,compression,index,traces", "")
        found = [*engine, *(each for each in extras.split(",") if each not in ("", "retrieval"))]
        found += [after for word, after in itertools.pairwise(words) if word == "--group"]
        return " ".join(found) or "kvrecall"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_step_is_done_once_and_brings_what_it_needs_alone(machine: Machine) -> None:
    assert machine.set_up("engine") == ENGINE
    assert machine.set_up("engine") == []
    assert machine.set_up("mooncake") == ["mooncake"]
    assert machine.set_up("bench") == ["kvrecall", "-- bench"]
    assert machine.set_up() == ["dev", "-- sglang"]
    for words in ((), ("engine",), ("mooncake",), ("bench",)):
        assert machine.set_up(*words) == []


def test_everything_is_one_call_of_pip(machine: Machine) -> None:
    found = machine.set_up()
    assert found[:2] == ["upgrade pip", "engine mooncake dev"]
    assert sorted(found[2:]) == ["-- bench", "-- sglang"]


@pytest.mark.long
def test_after_a_change_of_the_project_each_step_is_done_again(machine: Machine) -> None:
    machine.set_up()
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    assert machine.set_up("engine") == ["upgrade pip", "kvrecall"], "the engine is left alone"
    assert machine.set_up()[0] == "mooncake dev"


def test_an_environment_of_before_there_were_steps(machine: Machine) -> None:
    venv = machine.root / ".venv"
    subprocess.run([machine.python, "-m", "venv", str(venv)], check=True)
    (venv / "bin" / "has-engine").touch()
    (venv / ".kvrecall-ready").write_text("key\n")
    assert machine.set_up("engine") == ["upgrade pip", "kvrecall"]
    assert not (venv / ".kvrecall-ready").exists(), "an older set-up would take it for its own"
    assert machine.set_up()[0] == "mooncake dev"


@pytest.mark.long
def test_a_failed_step_leaves_the_engine_that_was_ready(machine: Machine) -> None:
    machine.set_up("engine")
    machine.failing.touch()
    machine.set_up(status=1)
    assert machine.set_up("engine") == []
    machine.failing.unlink()
    assert machine.set_up()[0] == "mooncake dev"
    machine.failing.touch()
    (machine.root / "pyproject.toml").write_text("")
    machine.set_up("engine", status=1)
    machine.failing.unlink()
    assert machine.set_up("engine") == ENGINE, "it may be half of one: made afresh"


@pytest.mark.long
def test_after_an_interruption_it_begins_afresh(machine: Machine) -> None:
    machine.set_up()
    (machine.root / ".venv" / ".kvrecall-unfinished").touch()
    assert machine.set_up("engine") == ENGINE
    assert machine.set_up()[0] == "mooncake dev"


def test_two_at_once_wait_for_each_other(machine: Machine) -> None:
    both = [machine.start("engine"), machine.start()]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = " ".join(machine.installed())
    assert found.count("engine") == 1, said
    assert found.count("dev") == 1


@pytest.mark.skipif(
    shutil.which("promtool") is not None or shutil.which("dpkg-deb") is None,
    reason="promtool is on the PATH, or this is no Debian",
)
def test_promtool_is_taken_out_of_its_package(machine: Machine, tmp_path: Path) -> None:
    package = tmp_path / "package"
    for name in ("DEBIAN/control", "usr/bin/prometheus", "usr/bin/promtool"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("#!/bin/sh\necho rules\n")
        (package / name).chmod(0o755)
    (package / "DEBIAN/control").write_text(
        "Package: prometheus\nVersion: 1\nArchitecture: all\nMaintainer: us\nDescription: this\n"
    )
    built = tmp_path / "prometheus_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", package, built], check=True, capture_output=True)
    asked = tmp_path / "asked"
    (tmp_path / "apt-get").write_text(
        f'#!/bin/sh\necho "$*" >>{asked}\n[ "$*" != "download prometheus" ] || cp {built} .\n'
    )
    machine.set_up()
    folder = machine.root / ".venv" / "peers" / "prometheus"
    assert subprocess.check_output([folder / "promtool"], text=True) == "rules\n"
    assert [path.name for path in folder.iterdir()] == ["promtool"]
    assert asked.read_text() == "download prometheus\n", "nothing is installed"


def test_an_unknown_step_is_named(machine: Machine) -> None:
    process = machine.start("everything")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no such step: everything; there are: engine, mooncake, bench, all" in said
