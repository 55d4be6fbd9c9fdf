"""The hostile run itself: it reports each kind of breach, and held only for attacks that ran."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrecall_lab.hostile.__main__ import figures_of, trial
from kvrecall_lab.hostile.attack import Attack, attacks

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from kvrecall_lab.hostile.__main__ import _run_here
from kvrecall_lab.hostile.attack import *

def run(folder):
    assert folder == Path.cwd() and not list(folder.iterdir())
    {body}

_run_here(Attack("a.b", "", run, False, 9))
"""


@pytest.mark.parametrize(
    ("body", "how", "seen"),
    [
        ("return 'refused:  401'", "held", "refused: 401"),
        ("raise GotIn('read 16 bytes')", "got_in", "read 16 bytes"),
        ("raise SecretSeen('in the log')", "secrets_seen", "in the log"),
        ("raise Crashed('the pool ended')", "crashes", "the pool ended"),
        ("raise Stalled('health waited')", "stalls", "health waited"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashes", "ended by SIGSEGV"),
        ("raise NotHere('no Mooncake')", "skipped", "no Mooncake"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero (its log: --keep)"),
        ("time.sleep(60)", "stalls", "did not end in 2 s; last line: "),
        ("sys.exit('no such thing')", "failed", "no such thing (its log: --keep)"),
    ],
)
def test_each_end_is_told(tmp_path: Path, body: str, how: str, seen: str) -> None:
    one = Attack("a.b", "", lambda _: "", False, 2 if "sleep" in body else 60)
    verdict = trial(one, tmp_path, [sys.executable, "-c", PROGRAM.format(body=body)])
    assert (verdict.how, verdict.seen) == (how, seen)
    line = figures_of([verdict], 1.0)
    assert line["attacks"] == (0 if how == "skipped" else 1)
    assert line["skipped"] == (["a.b"] if how == "skipped" else [])
    if how not in ("held", "skipped"):
        assert line[how] == 1


def test_every_attack_says_what_it_tries() -> None:
    assert [one.name for one in attacks() if not one.about] == []
