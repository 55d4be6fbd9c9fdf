"""The GPU check on a machine without a GPU: its parts that run on a CPU, and its report if there is
no device."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvrecall.engines.vllm.device.inline import InlineDevice
from kvrecall.lab.gpu_check import attention, cli, copies, servers
from kvrecall.lab.gpu_check.outcome import CheckError, Outcome, State
from kvrecall.lab.gpu_check.part import run_part

CPU = torch.device("cpu")
GOOD = Outcome("device", State.PASS, "a GPU")
NONE = Outcome("device", State.SKIP, "no GPU")
BAD = Outcome("copies", State.FAIL, "wrong bytes", {"bytes": 3})


def quiet(_: str) -> None:
    pass


@pytest.mark.engine
def test_copies_on_the_cpu() -> None:
    moved = copies.check_copies(CPU, blocks=16, page_bytes=4096)
    assert moved == len(copies.LAYOUTS) * 6 * 2 * 8 * 3 * 4096
    copies.check_order(CPU, page_bytes=4096)


@pytest.mark.engine
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
        copies.check_copies(CPU, blocks=16, page_bytes=4096)


def by_hand(device: InlineDevice, sources: Any, targets: Any, piece: Any) -> None:
    """What the kernel that fetches does."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for at in range(0, piece.count * piece.step, piece.step):
            ctypes.memmove(target + at, source + at, piece.nbytes)


@pytest.mark.engine
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


@pytest.mark.engine
def test_bandwidth_is_told_against_a_plain_copy() -> None:
    from kvrecall.lab.bench.restore import measure_bandwidth

    told = measure_bandwidth(4, 2, 1 << 16)
    assert set(told) == {"restore_gb_s", "scattered_gb_s", "plain_copy_gb_s", "restore_to_plain"}
    assert all(value > 0 for value in told.values())


def test_the_search_on_the_cpu() -> None:
    assert attention.check_selection(CPU, 64) == 1


def test_a_search_that_finds_other_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    class Drifting(attention.ExactSelector):
        def choose(self, *args: Any, **more: Any) -> Any:
            return super().choose(*args, **more) + next(calls) % 2

    monkeypatch.setattr(attention, "ExactSelector", Drifting)
    with pytest.raises(CheckError, match="the device chooses"):
        attention.check_selection(CPU, 64)


def test_parts_run_in_processes_of_their_own() -> None:
    if not torch.cuda.is_available():
        found = run_part("device", "cuda")
        assert (found.state, "no CUDA device" in found.note) == (State.SKIP, True)
    died = run_part("no such part", "cpu")
    assert (died.state, "KeyError" in died.note) == (State.FAIL, True)


def test_outcomes_are_read_back() -> None:
    assert Outcome.read(BAD.line()) == BAD


@pytest.mark.parametrize(
    ("outcomes", "plain", "required"),
    [([GOOD], 0, 0), ([NONE], 0, 1), ([GOOD, BAD], 1, 1)],
)
def test_the_exit_status(outcomes: list[Outcome], plain: int, required: int) -> None:
    assert (cli.status(outcomes, False), cli.status(outcomes, True)) == (plain, required)
    told = cli.summary(outcomes)
    assert told["ran"] == (outcomes[0] is GOOD)
    assert told["failed"] == [each.check for each in outcomes if each is BAD]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("not installed", "vLLM is not installed"),
        ("0.31.0", "vLLM 0.31.0 is installed; kvrecall is for 0.32"),
        ("0.33.0rc1+cu130", "kvrecall is for"),
    ],
)
def test_without_an_engine(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "engine_version", lambda: version)
    done = CliRunner().invoke(cli.app, ["--json"])
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert done.exit_code == 0
    assert told["ran"] is False
    assert said in told["why_not"]
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert CliRunner().invoke(cli.app, ["--require"]).exit_code == 1


@pytest.mark.parametrize("version", ["0.32.1", "0.32.0+cpu"])
def test_with_an_engine(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "engine_version", lambda: version)
    assert cli.without_engine() is None


@pytest.mark.long
@pytest.mark.engine
def test_a_form_on_the_cpu() -> None:
    """What runs on a GPU for each form: three answers of two servers, token for token."""
    outcome = cli.tried("tokens", quiet, lambda: servers.check_tokens("eager", quiet, 64 << 20))
    assert outcome.state is State.PASS, outcome.note
    assert outcome.figures["recalled"] == {"device": 2560, "host": 2560, "disk": 2560}


@pytest.mark.long
@pytest.mark.engine
def test_first_tokens_on_the_cpu() -> None:
    _, told = servers.measure_first_token((512,), servers.SMALL, 1, quiet, ("kvrecall",))
    assert set(told["seconds"]["kvrecall"]["512"]) == {"computed", "device", "host"}
    assert all(seconds > 0 for seconds in told["seconds"]["kvrecall"]["512"].values())


@pytest.mark.engine
def test_what_the_peer_is_started_with_is_what_vllm_takes() -> None:
    from kvrecall.engines.base import ServeSpec
    from kvrecall.engines.vllm.serving.app import parse_args

    words = servers.host_memory_options("OffloadingConnector", 1 << 30)
    extra = tuple(words[words.index("--") + 1 :])
    args = parse_args(ServeSpec("model", "127.0.0.1", 1, {}, extra_args=extra))
    config = args.kv_transfer_config
    assert config.kv_connector == "OffloadingConnector"
    assert config.kv_connector_extra_config == {"cpu_bytes_to_use": 1 << 30}
    assert args.load_format == "dummy"
