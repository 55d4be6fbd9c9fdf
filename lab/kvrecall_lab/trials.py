"""Commands that run many trials: some at a time, a line for each, and a line of JSON at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated, NoReturn, TypeVar

import typer

from kvrecall.processes.command import ProgressLines

Jobs = Annotated[int, typer.Option(min=1, max=8, help="How many run at a time.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep what is made, and the logs.")]
Listed = Annotated[bool, typer.Option("--list", help="List them and exit.")]

Found = TypeVar("Found")


def run_trials(
    progress: ProgressLines,
    trials: Mapping[str, Callable[[], Found]],
    jobs: int,
    text: Callable[[Found], str],
    stop: Callable[[], None] = lambda: None,
) -> dict[str, Found]:
    """Runs all, ``jobs`` at a time, and prints the ``text`` of each result as it comes. Returns
    them in the order of ``trials``. If one raises, or on Ctrl-C, no other starts, and ``stop`` ends
    those that run."""
    found: dict[str, Found] = {}
    progress.now(f"0/{len(trials)}, {jobs} at a time")
    workers = ThreadPoolExecutor(jobs)
    try:
        running = {workers.submit(trial): name for name, trial in trials.items()}
        for done in as_completed(running):
            result = found[running[done]] = done.result()
            progress(f"{len(found)}/{len(trials)} {text(result)}")
    except BaseException:
        stop()
        raise
    finally:
        workers.shutdown(cancel_futures=True)
    return {name: found[name] for name in trials}


def finish(figures: Mapping[str, object], is_good: bool) -> NoReturn:
    """Prints the last line, which is JSON, and exits with 0 if all is well, otherwise with 1."""
    print(json.dumps(figures), flush=True)
    raise typer.Exit(0 if is_good else 1)


def one_of(given: Sequence[str] | None, names: Sequence[str], option: str) -> Sequence[str]:
    """What was given to an option that may be repeated, all ``names`` without it. Raises
    typer.BadParameter for another name."""
    for name in given or ():
        if name not in names:
            text = f"{name!r} is none of {', '.join(names)}"
            raise typer.BadParameter(text, param_hint=f"--{option}")
    return given or names
