"""The GPU check on a machine without a GPU: its parts that run on a CPU, and its report if there is
no device."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from kvrecall.engines.vllm.device import driver
from kvrecall.engines.vllm.device.inline import InlineDevice
from kvrecall.errors import ConfigError
from kvrecall.gpu_check import CheckError, CheckOutcome, State, cli, copies, servers
from kvrecall.gpu_check.copies import LAYOUTS, Size
from kvrecall.gpu_check.first_token import FirstTokens
from kvrecall.gpu_check.part import PARTS, overdue, run_part
from kvrecall.processes.server import Answer
from kvrecall.testing import wait_until

CPU = torch.device("cpu")
GOOD = CheckOutcome("device", State.PASS, "a GPU")
NONE = CheckOutcome("device", State.SKIP, "no GPU")
BAD = CheckOutcome("copies", State.FAIL, "wrong bytes", {"bytes": 3})


def quiet(_: str, **figures: object) -> None:
    pass


SMALL = Size(blocks=17, layers=3, tokens=16, heads=2, dim=16)


def test_copies_on_the_cpu() -> None:
    moved = copies.check_copies(CPU, SMALL)
    layers = 4 * SMALL.block_bytes + SMALL.block_bytes * 9 // 8  # a latent is larger
    assert moved == 6 * 2 * 8 * layers


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda memory, pages: memory[-1:].fill_(1), "outside its slots"),
        (lambda memory, pages: pages[0].rows[:].fill_(1), "other bytes"),
        (lambda memory, pages: pages[1].rows[0].fill_(1), "outside its blocks"),
    ],
)
def test_copies_that_are_wrong_are_seen(
    fault: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copies.Copier

    def faulty(memory: torch.Tensor, groups: Any) -> Any:
        copier = real(memory, groups)
        inside = "slots" in said
        work = copier.store if inside else copier.load

        def wrong(copy: Any) -> Any:
            moved = work(copy)
            fault(memory, groups[0].pages)
            return moved

        setattr(copier, "store" if inside else "load", wrong)
        return copier

    monkeypatch.setattr(copies, "Copier", faulty)
    # An arena of which the last slot is never used, so that a write there is always wrong.
    monkeypatch.setattr(copies.random.Random, "sample", lambda _, of, count: list(of)[:count])
    with pytest.raises(CheckError, match=said):
        copies.check_copies(CPU, SMALL)


def by_hand(device: InlineDevice, sources: Any, targets: Any, piece: Any) -> None:
    """What the kernel that fetches does."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for at in range(0, piece.count * piece.step, piece.step):
            ctypes.memmove(target + at, source + at, piece.nbytes)


def test_fetches_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InlineDevice, "move", by_hand)
    copies.check_fetches(CPU, 16, 4096)
    for wrong in (
        lambda d, s, t, piece: by_hand(d, s, t[::-1], piece),
        lambda d, s, t, piece: by_hand(d, s, t, dataclasses.replace(piece, count=1)),
        lambda d, s, t, piece: by_hand(d, s, t, dataclasses.replace(piece, nbytes=piece.step)),
    ):
        monkeypatch.setattr(InlineDevice, "move", wrong)
        with pytest.raises(CheckError, match="fetched other bytes"):
            copies.check_fetches(CPU, 16, 4096)


def test_bandwidth_is_told_against_a_plain_copy() -> None:
    from kvrecall.bench.bandwidth import measure_bandwidth

    told = measure_bandwidth(4, 2, 1 << 16)
    first, third = told.pop("restore_to_plain_quartiles")
    assert 0 < first <= told["restore_to_plain"] <= third
    rates = {"restore_gb_s", "scattered_gb_s", "store_gb_s", "plain_copy_gb_s", "restore_to_plain"}
    assert set(told) == rates


def run(check: str, device: str = "cpu", limit_s: float = 60.0) -> tuple[CheckOutcome, list[str]]:
    said: list[str] = []
    return run_part(check, device, True, limit_s, lambda one: said.append(one.note)), said


def test_parts_run_in_processes_of_their_own() -> None:
    if not torch.accelerator.is_available():
        found, _ = run("device", "")
        assert (found.state, "finds no accelerator" in found.note) == (State.SKIP, True)
    died, _ = run("no such part")
    assert (died.state, "KeyError" in died.note) == (State.FAIL, True)


def test_a_part_says_what_it_finds_as_it_goes() -> None:
    found, said = run("traffic")
    assert found.state is State.PASS, found.note
    assert [note.split(":")[0] for note in said] == ["traffic ...", *LAYOUTS]


@pytest.mark.long
def test_a_part_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a module of its name that comes first, which starts a process of its own session."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found, said = run("device", limit_s=20.0)
    assert (found.state, found.note) == (State.FAIL, "did not end within 20 s")
    assert said == ["device ..."]
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("outcomes", "status", "headline"),
    [
        ([GOOD], 0, "failed: none; not run: none"),
        ([NONE], 1, f"nothing was checked: {NONE.note}; "),
        ([GOOD, BAD], 1, f"failed: {BAD.check}; "),
    ],
)
def test_the_exit_status(outcomes: list[CheckOutcome], status: int, headline: str) -> None:
    assert cli.status(outcomes) == status
    assert cli.headline(outcomes).startswith(headline)
    assert [CheckOutcome.read(each.line()) for each in outcomes] == outcomes
    told = cli.summary(outcomes)
    assert told["ran"] == (outcomes[0] is GOOD)
    assert told["failed"] == [each.check for each in outcomes if each is BAD]
    assert told["not_run"] == [each.check for each in outcomes if each is NONE]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("not installed", "none is installed here"),
        ("0.26.0", "0.26.0 is installed here"),
        ("0.32.0+cpu", ""),
    ],
)
def test_parts_with_an_engine_need_a_supported_one(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "engine_version", lambda: version)
    for name, part in PARTS.items():
        why = cli.hindrance(part, 480.0, True)
        assert why.endswith(said) if part.needs_engine else why == "", name


def test_parts_that_copy_blocks_load_no_engine() -> None:
    """What gpu-check runs on a machine with PyTorch alone."""
    blocked = (
        "import sys; sys.modules['vllm'] = None\n"
        "from kvrecall.gpu_check.part import PARTS, report\n"
        "for part in 'device', 'copies', 'traffic': report(PARTS, part, 'cpu', 'quick')\n"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    outcomes = [CheckOutcome.read(line) for line in done.stdout.splitlines()]
    ended = [each.state for each in outcomes if each.state is not State.RUNNING]
    assert ended == [State.PASS] * 3, done.stderr


class Clock:
    """Time that passes only in parts."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Names and limits of the parts that run; each takes all it may."""
    clock, ran = Clock(), list[tuple[str, float]]()

    def slow(name: str, device: str, quick: bool, limit_s: float, heard: Any) -> CheckOutcome:
        ran.append((name, limit_s))
        if name == "device":
            return CheckOutcome(name, State.PASS, "a GPU", {"device": "cuda"})
        clock.now += limit_s
        return CheckOutcome(name, State.FAIL, overdue(limit_s))

    monkeypatch.setattr(cli, "time", clock)
    monkeypatch.setattr(cli, "run_part", slow)
    monkeypatch.setattr(cli, "engine_version", lambda: "0.32.0")
    return ran


def test_quick_ends_in_time_and_names_what_did_not_run(
    parts: list[tuple[str, float]], tmp_path: Path
) -> None:
    done = CliRunner().invoke(cli.app, ["--quick", "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == lines
    assert sum(limit for _, limit in parts[1:]) <= cli.QUICK_S
    told = lines[-1]
    ran = {name for name, _ in parts}
    wanted = set(cli.wanted((), True))
    assert ran < wanted
    cut = {name for name in told["not_run"] if "that were left" in told["checks"][name]["note"]}
    assert len(cut) <= 1, "only the last was given less than its own limit"
    assert set(told["not_run"]) == wanted - ran | cut
    assert set(told["failed"]) == ran - cut - {"device"}


def test_only_some_parts(parts: list[tuple[str, float]]) -> None:
    arguments = ["--quick", "--only", "tokens-fp8", "--only", "copies"]
    CliRunner().invoke(cli.app, arguments)
    assert [name for name, _ in parts] == ["device", "copies", "tokens-fp8"]
    with pytest.raises(ConfigError, match="no such part; the parts are device, copies"):
        cli.wanted(["copy"], False)


def test_what_is_known_when_it_is_killed_is_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    words = ["gpu-check", "--device", "cpu", "--only", "traffic", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrecall", *words], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: out.exists() and '"NHD: ' in out.read_text(), 120)
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            one.kill()
        process.wait()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["check"] for line in lines[:2]] == ["start", "device"]
    assert [line["state"] for line in lines if line["check"] == "device"] == ["running", "pass"]


def test_the_facts_of_a_device_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        get_device_properties=lambda number: SimpleNamespace(name=f"card {number}"),
        mem_get_info=lambda number: (5, 9),
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert driver.accelerators() == [driver.DeviceFacts(f"card {n}", "", 9, 5) for n in range(2)]
    monkeypatch.setattr(torch.version, "cuda", None, raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.2", raising=False)
    assert driver.built_for() == "ROCm 7.2"


@pytest.mark.long
@pytest.mark.engine
def test_a_form_on_the_cpu() -> None:
    """What runs on a GPU for each form: three answers of two servers, token for token."""
    outcome, _ = run("tokens-eager", limit_s=600)
    assert outcome.state is State.PASS, outcome.note
    assert outcome.figures["recalled"] == {"device": 2560, "host": 2560, "disk": 2560}


@pytest.mark.long
@pytest.mark.engine
def test_first_tokens_on_the_cpu() -> None:
    outcome, _ = run("first-token", limit_s=600)
    assert outcome.state is State.PASS, outcome.note
    found = set(outcome.figures["seconds"]["kvrecall"]["512"])
    assert found == {"computed", "device", "host", "together"}


class Recalling:
    """Stands in for a server: what it recalls, by its own word and by vLLM's counters."""

    def __init__(self, recalled: dict[str, int], external: int) -> None:
        self._recalled, self._external, self._asked = recalled, external, 0

    def ask(self, prompt: str, count: int) -> Answer:
        self._asked += 1
        return Answer(528, self._recalled, (1, 2), (), "", 0.5, 0.6)

    def metric(self, name: str) -> float:
        return self._external * self._asked if "external" in name else 0.0

    def settle(self) -> None: ...

    forget_device = settle


@pytest.mark.parametrize("name", ["kvrecall", "OffloadingConnector"])
def test_a_prefix_that_was_not_loaded_is_not_called_loaded(name: str, tmp_path: Path) -> None:
    tokens = FirstTokens(servers.SMALL, (512,), 1, tmp_path, quiet)
    theirs = {} if name == "kvrecall" else {"computed": 528}  # what is said of other connectors
    server: Any = Recalling(theirs or {"host": 512, "computed": 16}, 512)
    tokens.ask(server, name, 512, "host", "")
    tokens.ask(server, name, 512, "host", *"abcd")
    found = tokens.finding()[1]["seconds"][name]["512"]
    assert (found["host"]["p50"], found["together"]["n"]) == (0.5, 4)
    declining: Any = Recalling(theirs or {"host": 384, "computed": 144}, 384)
    tokens.ask(declining, name, 512, "host", "")
    tokens.ask(declining, name, 512, "host", *"abcd")
    both = r"1 of 512 tokens meant from host: \[\{.*384.*4 of 512 tokens meant from host: \[\{.*384"
    with pytest.raises(CheckError, match=both):
        tokens.finding()
