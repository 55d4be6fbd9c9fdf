"""Faults planted in the product, one at a time, each of which a test must find.

``lab/mutants.toml`` is the list. ``make mutants`` runs this; the last line is JSON.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol
from xml.etree import ElementTree

import typer

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.trials import Jobs, Keep, Listed, finish, one_of, run_trials

app = typer.Typer(add_completion=False)

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "lab" / "mutants.toml"
_SOURCE = ROOT / "src"
_TEST_S = 120  # of one test, up to four times that on a busy machine; beyond, it hangs
_CPU_S = 60  # of the tests of one fault
_BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")


class Fault(Protocol):
    """What ``trial`` plants in ``file``, below ``src/kvrecall``."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def tests(self) -> tuple[str, ...]: ...
    def applied(self, source: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Mutant:
    """``text`` of ``file``, below ``src/kvrecall``, becomes ``becomes``: its occurrence ``at``,
    which must be told where there are several. ``why``: what goes wrong then. ``tests``: files or
    node ids below tests/, one of which must fail. ``equivalent``: why none can; it is not run."""

    name: str
    file: str
    text: str
    becomes: str
    why: str
    tests: tuple[str, ...] = ()
    at: int | None = None
    equivalent: str = ""

    def applied(self, source: str) -> str:
        """The mutated source. Raises ValueError if the text is not found, or more than once."""
        parts = source.split(self.text)
        count, at = len(parts) - 1, self.at or 0
        if not at < count or (count > 1 and self.at is None):
            raise ValueError(f"{self.file} has {count} times {self.text!r}")
        return self.becomes.join((self.text.join(parts[: at + 1]), self.text.join(parts[at + 1 :])))


def mutants() -> list[Mutant]:
    """All of the list."""
    tables = tomllib.loads(LIST.read_text())["mutant"]
    return [
        Mutant(**{**table, "tests": tuple(f"tests/{test}" for test in table.get("tests", ()))})
        for table in tables
    ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``how``: ``killed``, ``survived``, or ``broken``: nothing is known, for the reason ``seen``.
    Of tests without a fault: ``passes``, ``fails``, or ``broken``. ``cpu_s``: processor time of the
    tests."""

    name: str
    how: str
    seen: str
    cpu_s: float

    @property
    def text(self) -> str:
        mark = self.how if self.how in ("killed", "passes") else self.how.upper()
        return f"{mark:8} {self.name:44} {self.cpu_s:5.1f} s  {self.seen}"


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="A mutant to try; repeatable.")] = None,
    show: Listed = False,
    jobs: Jobs = 2,
    keep: Keep = False,
    results: Annotated[
        Path | None, typer.Option(help="What is found is kept there; a run that broke goes on.")
    ] = None,
) -> None:
    """Plant each fault of lab/mutants.toml in a private copy of the sources and run the tests that
    should find it, which must pass without it.

    The last line is JSON; the exit status is 0 only if every fault is found.
    """
    known = {one.name: one for one in mutants()}
    chosen = [known[name] for name in one_of(only, list(known), "only")]
    if show:
        for one in chosen:
            typer.echo(f"{one.name:44} {one.equivalent and 'equivalent: '}{one.why}")
        return
    chosen = [one for one in chosen if not one.equivalent]
    with command_folder("mutants", keep) as folder:
        began = time.monotonic()
        plain = folder / "plain"
        shutil.copytree(_SOURCE, plain)
        compileall.compile_dir(plain, quiet=2)
        progress = ProgressLines("mutants")
        files = sorted({test.partition("::")[0] for one in chosen for test in one.tests})
        record, every = Record(results), sorted(map(str, plain.rglob("*.py")))
        checks = {
            file: record.kept(partial(_unmutated, file, chosen, plain, folder), file, *every, file)
            for file in files
        }
        before = run_trials(progress, checks, jobs, lambda verdict: verdict.text)
        failing = [file for file, verdict in before.items() if verdict.how != "passes"]
        trials = {
            one.name: record.kept(
                partial(trial, one, plain, folder, failing),
                *(str(one), f"{plain}/kvrecall/{one.file}", *one.tests),
            )
            for one in chosen
        }
        verdicts = run_trials(progress, trials, jobs, lambda verdict: verdict.text).values()
        left = [one for one in verdicts if one.how != "killed"]
        figures = {
            "mutants": len(chosen),
            "killed": len(chosen) - len(left),
            "survived": [one.name for one in left if one.how == "survived"],
            "broken": [one.name for one in left if one.how == "broken"],
            "equivalent": len(known) - len([one for one in known.values() if not one.equivalent]),
            "cpu_seconds": round(sum(one.cpu_s for one in (*before.values(), *verdicts))),
            "seconds": round(time.monotonic() - began),
        }
        finish(figures, not left)


class Record:
    """Verdicts of this run and of earlier ones, a line of JSON each, in a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else ()
        self._known = {of: Verdict(**told) for of, told in map(json.loads, lines)}

    def kept(self, find: Callable[[], Verdict], of: str, *files: str) -> Callable[[], Verdict]:
        """``find``, or what it found before ``of`` the same and with the same ``files``, if that
        was good."""
        parts = [of.encode(), *((ROOT / one.partition("::")[0]).read_bytes() for one in files)]
        digest = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()

        def found() -> Verdict:
            verdict = find()
            if self._path is not None:
                with self._path.open("a") as file:
                    print(json.dumps([digest, asdict(verdict)]), file=file)
            return verdict

        known = self._known.get(digest)
        return found if known is None or known.how not in ("killed", "passes") else lambda: known


def _unmutated(file: str, chosen: Iterable[Mutant], plain: Path, folder: Path) -> Verdict:
    """What the tests of one file say of the product as it is."""
    named = {test for one in chosen for test in one.tests if test.partition("::")[0] == file}
    told = _tested(f"as it is: {file}", [file] if file in named else sorted(named), plain, folder)
    return replace(told, how={"survived": "passes", "killed": "fails"}.get(told.how, told.how))


def trial(
    one: Fault, plain: Path, folder: Path, failing: Sequence[str], *more: str, cpu_s: int = _CPU_S
) -> Verdict:
    """``more``: arguments of pytest. ``cpu_s``: tests that take more processor time have failed."""
    if fail := [test for test in one.tests if test.partition("::")[0] in failing]:
        return Verdict(one.name, "broken", f"{fail[0]} fails without it", 0.0)
    tree = folder / one.name
    shutil.copytree(plain, tree, copy_function=os.link)  # with bytecode that stays valid
    file = tree / "kvrecall" / one.file
    try:
        planted = one.applied(file.read_text())
        file.unlink()
        file.write_text(planted)
    except (ValueError, OSError) as error:
        return Verdict(one.name, "broken", str(error), 0.0)
    for stale in file.parent.glob(f"__pycache__/{file.stem}.*"):
        stale.unlink()
    verdict = _tested(one.name, (*more, *one.tests), tree, folder, cpu_s)
    shutil.rmtree(tree, ignore_errors=True)
    return verdict


def _tested(
    name: str, tests: Sequence[str], source: Path, folder: Path, most_cpu_s: int = _CPU_S
) -> Verdict:
    """Runs tests on these sources, until the first fails."""
    base = folder / name.replace("/", "-")
    report, log = Path(f"{base}.xml"), Path(f"{base}.log")
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    test_s = _TEST_S * min(max(1.0, busy), 4.0)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={test_s}"]
    arguments += [f"--junitxml={report}", *tests]
    with _nursery() as nursery:
        status, cpu_s = nursery.run(source, arguments, log, most_cpu_s)
    if status == 0:
        return Verdict(name, "survived", "", cpu_s)
    if status == -signal.SIGXCPU:
        return Verdict(name, "killed", f"no end in {most_cpu_s} s of processor time", cpu_s)
    failure = _failure(report)
    if status != 1 or failure is None or failure.startswith(_BROKEN):
        why = failure or f"pytest ended with {status}"
        return Verdict(name, "broken", f"{why[:160]} (its log: --keep)", cpu_s)
    return Verdict(name, "killed", failure[:100], cpu_s)


class Nursery:
    """A process whose children run tests, see ``nursery``; ends with its input."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_paths())}
        command = [sys.executable, "-m", "kvrecall_lab.nursery"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def run(
        self, source: Path, arguments: Sequence[str], log: Path, most_cpu_s: int
    ) -> tuple[int, float]:
        """Exit status and processor seconds of pytest."""
        order = {
            "most_cpu_s": most_cpu_s,
            "source": str(source),
            "arguments": arguments,
            "log": str(log),
            "engine": any("/engines/" in one for one in arguments),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        told = json.loads(self._process.stdout.readline())
        return told["status"], told["cpu_s"]


def _paths() -> list[str]:
    """The path of modules without the product: a test's child has its own copy."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(ROOT / "lab"), *(one for one in given if one and Path(one) != _SOURCE)]


_IDLE: deque[Nursery] = deque()


@contextlib.contextmanager
def _nursery() -> Iterator[Nursery]:
    """One that no other thread uses."""
    try:
        nursery = _IDLE.pop()
    except IndexError:
        nursery = Nursery()
    yield nursery
    _IDLE.append(nursery)


def _failure(report: Path) -> str | None:
    """The message of the first failure, on a line; None if there is none."""
    if not report.exists():
        return None
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                text = " ".join((found.get("message") or "").split())
                return text.removeprefix("failed on setup with ").strip('"')
    return None


if __name__ == "__main__":
    app()
