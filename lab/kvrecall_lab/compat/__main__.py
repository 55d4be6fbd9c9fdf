"""``python -m kvrecall_lab.compat``: what ``make compat`` runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from kvrecall.engines.vllm.compat.versions import VERSIONS
from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.compat.parts import PARTS, Seen, run_part
from kvrecall_lab.compat.wheels import NEWEST, RELEASES, newest_release, provide
from kvrecall_lab.trials import Jobs, Keep, finish, one_of, run_trials

app = typer.Typer(add_completion=False)

_progress = ProgressLines("compat")


@app.command()
def compat(
    version: Annotated[
        list[str] | None,
        typer.Option(
            help="A version to run; may be given several times. `newest`: what the package index "
            "has, also if kvrecall refuses it."
        ),
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
    versions = one_of(version, (*VERSIONS, NEWEST), "version") if version else VERSIONS
    parts = one_of(part, tuple(PARTS), "part")
    with command_folder("compat", keep, large=("engines",)) as folder:
        with _progress.alive():
            releases = {each: RELEASES.get(each) or newest_release() for each in versions}
            overlays = {each: provide(releases[each], _progress) for each in versions}
            trials = {
                f"{number} {name}": partial(
                    run_part, name, overlays[number], folder, f"{number}-{name}"
                )
                for name in parts
                for number in versions
            }
            seen = run_trials(_progress, trials, jobs, lambda one: one.text)
        by_version = {
            number: {name: seen[f"{number} {name}"] for name in parts} for number in versions
        }
        figures = {
            number: _figures(releases[number].how, found) for number, found in by_version.items()
        }
        finish(figures, all(one.holds for one in seen.values()))


def _figures(how: str, found: dict[str, Seen]) -> dict[str, object]:
    told: dict[str, object] = {name: seen.holds for name, seen in found.items()}
    whys = {name: seen.broken for name, seen in found.items() if not seen.holds}
    told |= {"tests": sum(seen.passed for seen in found.values())}
    told |= {"skipped": sum(seen.skipped for seen in found.values()), "how": how}
    return told | ({"why": whys} if whys else {})


if __name__ == "__main__":
    app()
