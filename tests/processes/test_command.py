"""The folder of a laboratory's command, however the command ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from kvrecall.errors import EngineError
from kvrecall.processes import command as processes
from kvrecall.processes.command import command_folder


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
