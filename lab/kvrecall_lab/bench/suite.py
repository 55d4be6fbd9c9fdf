"""``bench all``: the benchmarks whose figures the pages show, each in its own process; failures are
recorded, and the others go on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrecall.bench.cli import COMMANDS
from kvrecall.bench.report import machine
from kvrecall.processes.child import ChildProcess
from kvrecall.processes.command import own
from kvrecall_lab.bench.peers import find_peers

LATEST = Path("lab/results/latest.json")
_PACKAGES = (
    "vllm",
    "torch",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "lmcache",
    "diskcache",
)
Say = Callable[[str], None]
Step = tuple[str, float]
"""A benchmark's words, and its limit in seconds. Its first word names it in the results."""

FULL: Sequence[Step] = (
    ("lookup", 120),
    ("tiers", 420),
    ("disk", 240),
    ("restore --tokens 8192", 420),
    ("overhead --rounds 2", 300),
    ("service", 180),
    ("remote --repetitions 3", 300),
    ("chat --sessions 32 --turns 3 --budget 900", 1100),
    ("decode --contexts 16K,64K --shares 0.2,0.05", 300),
    ("needle --lengths 16K,64K --samples 4 --shares 0.2,0.05", 900),
)
"""For figures: about 30 minutes on two cores."""

QUICK: Sequence[Step] = (
    ("lookup", 120),
    ("tiers --rounds 2 --requests 2", 240),
    ("service --blocks 2000 --repetitions 1", 120),
    ("restore --tokens 4096 --repetitions 3", 300),
    ("remote --no-engines --repetitions 1", 180),
    ("chat --sessions 4 --turns 2 --variants device,host", 360),
    ("decode --contexts 8K --rounds 3", 240),
    ("needle --lengths 1K --samples 2 --tasks single --shares 0.5", 300),
)
"""A check that everything runs: about five minutes. Its figures are not representative."""


def run_all(steps: Sequence[Step], out: Path, say: Say, add: bool = False, note: str = "") -> int:
    """Runs ``steps`` and writes ``out`` after each. Returns the number of failures. ``add``: keep
    the results of other steps in ``out``. ``note``: a remark on this run for readers, such as other
    load on the machine."""
    results: dict[str, Any] = {}
    if add:
        with suppress(OSError, ValueError):
            results = json.loads(out.read_text())["results"]
    find_peers()
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number, (words, limit_s) in enumerate(steps, 1):
        name = words.split()[0]
        say(f"{number} of {len(steps)}: {name}")
        load, began = round(os.getloadavg()[0], 2), time.monotonic()
        result = _run(words, limit_s, say)
        took = round(time.monotonic() - began, 1)
        failed += "error" in result
        say(f"{name}: {result.get('error', 'done')} ({took:.0f} s)")
        program = "kvrecall bench" if name in COMMANDS else "python -m kvrecall_lab.bench"
        command = f"{program} {words}"
        results[name] = {"command": command, "took_s": took, "load_before": load, **result}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"note": note, "date": now, "machine": machine(), "versions": versions}
        unfinished = out.with_suffix(".tmp")
        text = json.dumps({**facts, "results": results}, indent=1, ensure_ascii=False)
        unfinished.write_text(text + "\n")
        unfinished.replace(out)
    say(f"{failed} of {len(steps)} failed: {out}")
    return failed


def _run(words: str, limit_s: float, say: Say) -> dict[str, Any]:
    """A benchmark's line of JSON, or ``error`` with what it said last."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as folder:
        child, output = ChildProcess(Path(folder) / "log"), Path(folder) / "output"
        end = time.monotonic() + limit_s
        with output.open("wb") as file:
            command = own("kvrecall_lab.bench.cli", *words.split(), "--json")
            process = child.launch(command, stdout=file)
        try:
            with child.log.open(errors="replace") as said:
                while (running := process.poll() is None) and time.monotonic() < end:
                    time.sleep(0.2)
                    for line in said:
                        if line.startswith("bench: "):
                            say("  " + line.split(" ", 2)[-1].rstrip())
        finally:
            child.stop(90.0)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left
        error = f"exit status {process.returncode}" if process.returncode else "no line of JSON"
        if running:
            error = f"not done after {limit_s:.0f} s"
        elif process.returncode == 0:
            with suppress(IndexError, ValueError):
                return dict(json.loads(output.read_text().splitlines()[-1]))
        return {"error": error, "said": child.log_tail(12).splitlines()}
