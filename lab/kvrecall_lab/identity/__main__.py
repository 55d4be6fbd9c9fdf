"""``python -m kvrecall_lab.identity``: what ``make identity`` runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.identity.pairs import PAIRS, Kv, Pair
from kvrecall_lab.identity.trial import Laboratory, Verdict
from kvrecall_lab.trials import Jobs, Keep, Listed, finish, one_of, run_trials

app = typer.Typer(add_completion=False)

_FAULTS_SHOWN = 3
_progress = ProgressLines("identity")


@app.command()
def identity(
    only: Annotated[list[str] | None, typer.Option(help="A pair to try; repeatable.")] = None,
    show: Listed = False,
    jobs: Jobs = 2,
    keep: Keep = False,
) -> None:
    """Run real engines in pairs that differ in one respect, on one pool: A saves prompts on disk, B
    requests them and saves others, and A, restarted, requests all. Every reply is compared with
    that of the same engine without a pool. If the KV is equal, each must recall what the other has
    saved; otherwise, neither may recall a token of it. In the audit pairs the engines have one
    namespace, and the audit of the first hit must detect the difference.

    The last line is JSON; the exit status is 0 only if no reply is wrong, all pairs of equal KV
    share, every audit pair is caught, and every pair shows what it says.
    """
    if show:
        for pair in PAIRS:
            typer.echo(f"{pair.name:26} {_kind(pair):6} {pair.about}")
        return
    known = {pair.name: pair for pair in PAIRS}
    chosen = one_of(only, list(known), "only")
    with command_folder("identity", keep, large=("models", "pools", "cache")) as folder:
        began = time.monotonic()
        with _progress.alive():
            _progress(f"{len(chosen)} pairs, {jobs} engines at a time, in {folder}")
            laboratory = Laboratory(folder, keep)
            trials = {name: partial(laboratory.trial, known[name]) for name in chosen}
            stop = laboratory.lives.engines.stop
            verdicts = list(run_trials(_progress, trials, jobs, _text, stop).values())
        figures = _figures(verdicts, time.monotonic() - began)
        finish(figures, not any(verdict.faults for verdict in verdicts))


def _kind(pair: Pair) -> str:
    return "blind" if pair.blind else pair.kv.value


def _text(verdict: Verdict) -> str:
    """A verdict as text: a line, and one for each of the first faults."""
    pair = verdict.pair
    seen = f"{verdict.replies} replies"
    if pair.kv is Kv.EQUAL:
        seen += f", {verdict.shared[0]} and {verdict.shared[1]} tokens shared"
    if verdict.audits:
        seen += f", {verdict.audits} audits, {verdict.caught} failed"
    mark = "FAULT" if verdict.faults else "ok"
    text = f"{mark:5} {pair.name:24} {_kind(pair):6} {verdict.seconds:4.0f} s  {seen}"
    if pair.kv is Kv.OTHER and not verdict.failed:
        far = "all other" if verdict.contrast == math.inf else f"{verdict.contrast:.1g} apart"
        text += f", without a pool {far}"
    shown = verdict.faults[:_FAULTS_SHOWN]
    more = len(verdict.faults) - len(shown)
    lines = [text, *(f"    {one}" for one in shown)]
    return "\n".join([*lines, f"    and {more} more"] if more else lines)


def _figures(verdicts: Sequence[Verdict], seconds: float) -> dict[str, object]:
    """The verdict on all pairs."""
    equal = [one for one in verdicts if one.pair.kv is Kv.EQUAL]
    blind = [one for one in verdicts if one.pair.blind]
    return {
        "pairs": len(verdicts),
        "wrong": sum(len(one.wrong) for one in verdicts),
        "shared_where_equal": sum(one.has_shared for one in equal),
        "equal": len(equal),
        "audited": len(blind),
        "caught_by_audit": sum(one.is_caught for one in blind),
        "replies": sum(one.replies for one in verdicts),
        "noise": max((one.noise for one in verdicts), default=0.0),
        "wrong_pairs": [one.pair.name for one in verdicts if one.wrong],
        "not_shared": [one.pair.name for one in equal if not one.has_shared],
        "not_caught": [one.pair.name for one in blind if not one.is_caught],
        "unfair": [one.pair.name for one in verdicts if one.unfair],
        "failed": [one.pair.name for one in verdicts if one.failed],
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    app()
