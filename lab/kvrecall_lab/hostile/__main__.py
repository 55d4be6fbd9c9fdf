"""``python -m kvrecall_lab.hostile``: what ``make hostile`` runs."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.hostile.attack import BREACHES, Attack, Breach, NotHere, attacks
from kvrecall_lab.trials import Jobs, Keep, Listed, finish, run_trials

app = typer.Typer(add_completion=False)

_BREACHED, _NOT_HERE = 3, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """``how`` is ``held``, ``skipped``, ``failed`` (the attack could not be carried out) or a
    breach's key."""

    attack: Attack
    how: str
    seen: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.how in ("held", "skipped")

    @property
    def text(self) -> str:
        mark = self.how if self.is_good else self.how.upper()
        return f"{mark:12} {self.attack.name:40} {self.seconds:5.1f} s  {self.seen}"


@app.command()
def hostile(
    only: Annotated[
        list[str] | None, typer.Option(help="Attacks to run, by name or pattern; repeatable.")
    ] = None,
    engines: Annotated[bool, typer.Option(help="Also run those that start engines.")] = True,
    show: Listed = False,
    jobs: Jobs = 2,
    keep: Keep = False,
    run: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Attack everything that listens, reads or prints: each attack starts the real part, in a
    process of its own, and plays a stranger.

    The last line is JSON; the exit status is 0 only if every attack was carried out and held.
    """
    if run:
        _run_here(next(one for one in attacks() if one.name == run))
    chosen = [
        one
        for one in attacks()
        if (engines or not one.needs_engine)
        and (not only or any(fnmatch.fnmatch(one.name, pattern) for pattern in only))
    ]
    if only and not chosen:
        raise typer.BadParameter(
            "no attack has such a name; --list shows them", param_hint="--only"
        )
    if show:
        for one in chosen:
            typer.echo(f"{one.name:40} {'engine' if one.needs_engine else '':6} {one.about}")
        return
    with command_folder("hostile", keep) as folder:
        began = time.monotonic()
        trials = {one.name: partial(trial, one, folder) for one in chosen}
        progress = ProgressLines("hostile")
        verdicts = list(run_trials(progress, trials, jobs, lambda verdict: verdict.text).values())
        figures = figures_of(verdicts, time.monotonic() - began)
        finish(figures, all(verdict.is_good for verdict in verdicts))


def figures_of(verdicts: Sequence[Verdict], seconds: float) -> dict[str, object]:
    counts = Counter(verdict.how for verdict in verdicts)
    skipped = [verdict.attack.name for verdict in verdicts if verdict.how == "skipped"]
    return {
        "attacks": len(verdicts) - len(skipped),
        **{breach.key: counts[breach.key] for breach in BREACHES},
        "failed": counts["failed"],
        "skipped": skipped,
        "seconds": round(seconds),
    }


def _run_here(one: Attack) -> None:
    """Runs an attack in this process; its last line and its status say how it ended."""
    try:
        seen, status = one.run(Path.cwd()), 0
    except Breach as breach:
        seen, status = f"{breach.key}: {breach}", _BREACHED
    except NotHere as missing:
        seen, status = str(missing), _NOT_HERE
    print(" ".join(seen.split()), flush=True)
    sys.stdout.flush()
    os._exit(status)  # threads of what was attacked do not keep it


def trial(one: Attack, folder: Path, command: Sequence[str] = ()) -> Verdict:
    """Runs an attack in a process of its own, in an empty folder, and ends all that it started."""
    began = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix=f"{one.name}-", dir=folder))
    log = folder / f"{one.name}.log"
    command = command or [sys.executable, "-m", "kvrecall_lab.hostile", "--run", one.name]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(one.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(child)
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    how, seen = _how(status, lines[-1], one.limit_s)
    return Verdict(one, how, seen, time.monotonic() - began)


def _how(status: int | None, last: str, limit_s: float) -> tuple[str, str]:
    match status:
        case None:
            return "stalls", f"did not end in {limit_s:g} s; last line: {last}"
        case 0:
            return "held", last
        case 3:
            key, _, seen = last.partition(": ")
            return key, seen
        case 4:
            return "skipped", last
        case _ if status < 0:
            return "crashes", f"ended by {signal.Signals(-status).name}"
    return "failed", f"{last} (its log: --keep)"


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    app()
