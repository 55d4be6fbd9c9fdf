"""A command's progress, and its folder, however it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from kvrecall.errors import EngineError
from kvrecall.processes import command as processes
from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall.testing import wait_until


@pytest.fixture(autouse=True)
def _no_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "unwind_on_signals", lambda: None)
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("end", "status", "left"),
    [
        (None, None, None),
        (typer.Exit(0), 0, None),
        (typer.Exit(1), 1, ["log"]),
        (EngineError("it is gone"), 1, ["log"]),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_what_fails_leaves_its_logs(
    end: BaseException | None, status: int | None, left: list[str] | None
) -> None:
    found = None
    try:
        with command_folder("try", large=["models"]) as folder:
            (folder / "log").touch()
            (folder / "models").mkdir()
            if end is not None:
                raise end
    except typer.Exit as exit:
        found = exit.exit_code
    assert found == status
    assert (sorted(p.name for p in folder.iterdir()) if folder.exists() else None) == left


def test_a_folder_is_kept_whole_or_not_at_all() -> None:
    with command_folder("try", keep=True, large=["models"]) as kept:
        (kept / "models").mkdir()
    assert (kept / "models").is_dir()
    with pytest.raises(typer.Exit), command_folder("try", keep_failed=False) as gone:
        raise typer.Exit(1)
    assert not gone.exists()


def test_each_line_tells_the_time_since_the_command_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say = ProgressLines("try")
    with say.alive():
        say("one")
    say("  two")
    found = capsys.readouterr()
    assert found.out == ""
    assert re.fullmatch(r"try: \d+:\d\d one\ntry: \d+:\d\d   two\n", found.err)


def test_silence_is_broken_by_what_is_done_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SILENCE_S", 0.0)
    said = []

    def was_said() -> bool:
        said.append(capsys.readouterr().err)
        return "... asking the server" in "".join(said)

    say = ProgressLines("try")
    with say.alive():
        say("a line")
        say.now("asking the server")
        wait_until(was_said)
