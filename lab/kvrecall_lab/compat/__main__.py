"""``python -m kvrecall_lab.compat``: what ``make compat`` runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.engines.vllm.compat.versions import VERSIONS
from kvrecall.processes.command import Jobs, Keep, command_folder, one_of
from kvrecall.processes.progress import ProgressLines
from kvrecall_lab.compat.parts import PARTS, Seen, run_part
from kvrecall_lab.compat.wheels import RELEASES, provide

app = typer.Typer(add_completion=False)

_progress = ProgressLines("compat")


@app.command()
def compat(
    version: Annotated[
        list[str] | None, typer.Option(help="A version to run; may be given several times.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"A part to run: {', '.join(PARTS)}; may be given several times."),
    ] = None,
    jobs: Jobs = 2,
    keep: Keep = False,
) -> None:
    """Run the connector's exactness tests, the server's and retrieval attention's with each
    supported version of vLLM: builds for CPUs of 0.30 to 0.32, and the Python files of 0.33 over
    the compiled modules of 0.32. Other versions than the installed one are fetched the first time
    (600 MB) and kept beside the environment's packages.

    The last line is JSON; the exit status is 0 only if every part of every version holds.
    """
    versions, parts = one_of(version, VERSIONS, "version"), one_of(part, tuple(PARTS), "part")
    with command_folder("compat", keep, large=("engines",)) as folder:
        with _progress.alive():
            found = _run(versions, parts, jobs, folder)
        print(json.dumps({each: _figures(each, found[each]) for each in versions}), flush=True)
        holds = all(seen.holds for parts_seen in found.values() for seen in parts_seen.values())
        raise typer.Exit(0 if holds else 1)


def _run(
    versions: Sequence[str], parts: Sequence[str], jobs: int, folder: Path
) -> dict[str, dict[str, Seen]]:
    """What each part of each version has shown."""
    overlays = {each: provide(RELEASES[each], _progress) for each in versions}
    found: dict[str, dict[str, Seen]] = {each: {} for each in versions}
    with ThreadPoolExecutor(jobs) as workers:

        def attempt(number: str, name: str) -> Seen:
            _progress.now(f"{number} {name}")
            return run_part(name, overlays[number], folder, f"{number}-{name}")

        tries = {
            workers.submit(attempt, number, name): (number, name)
            for name in parts
            for number in versions
        }
        for done in as_completed(tries):
            number, name = tries[done]
            seen = found[number][name] = done.result()
            verdict = "ok" if seen.holds else f"FAILED: {seen.why or 'no test ran'}"
            _progress(f"{number} {name}: {seen.passed} tests in {seen.seconds:.0f} s: {verdict}")
    return found


def _figures(version: str, found: dict[str, Seen]) -> dict[str, object]:
    told: dict[str, object] = {name: seen.holds for name, seen in found.items()}
    whys = {name: seen.why for name, seen in found.items() if not seen.holds}
    told |= {"tests": sum(seen.passed for seen in found.values())}
    told |= {"skipped": sum(seen.skipped for seen in found.values()), "how": RELEASES[version].how}
    return told | ({"why": whys} if whys else {})


if __name__ == "__main__":
    app()
