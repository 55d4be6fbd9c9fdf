"""Engine processes on a CPU wait asleep: with the connector, and where it is asked for."""

from __future__ import annotations

import os

import pytest

from kvrecall.errors import ConfigError

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")
waits = pytest.importorskip("kvrecall.engines.vllm.compat.waits")


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM waits here in its own way")


@pytest.mark.parametrize(
    ("asked", "installed", "registered"),
    [("", True, False), ("sleep", True, True), ("spin", False, False)],
)
def test_who_sleeps(
    asked: str, installed: bool, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the connector unless vLLM's own way is asked for, without it only if asked for."""
    monkeypatch.setenv(waits.WAITS, asked)
    for act, sleeps in ((waits.install, installed), (waits.register, registered)):
        monkeypatch.setattr(shm_broadcast, "sched_yield", os.sched_yield)
        act()
        assert (shm_broadcast.sched_yield is not os.sched_yield) == sleeps
        shm_broadcast.sched_yield()


def test_asking_changes_no_answer() -> None:
    environ: dict[str, str] = {}
    waits.ask(environ)
    assert environ == {waits.WAITS: "sleep"}
    environ[waits.WAITS] = "spin"
    waits.ask(environ)
    assert environ == {waits.WAITS: "spin"}


def test_what_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waits.WAITS, "nap")
    with pytest.raises(ConfigError, match="KVRECALL_WAITS is 'nap'; it must be sleep or spin"):
        waits.register()
