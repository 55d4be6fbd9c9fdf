"""``bench all``: runs the benchmarks of a suite one after the other, each in its own
process, and records failures.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_TAIL = 12
Say = Callable[[str], None]
_TRACE = "conversation_trace.jsonl"
TRACES = (Path("var") / _TRACE, Path("../shared/traces") / _TRACE)
"""Where Mooncake's recorded trace (FAST'25, github.com/kvcache-ai/Mooncake) is looked for; it is no
part of the repository, and without it there is no replay."""


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark: ``bench WORDS``, at most ``limit_s`` seconds.

    ``needs``: a file without which it is left out.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    needs: Path | None = None


def full() -> Sequence[Step]:
    """For figures: about 42 minutes on two cores."""
    trace = _trace()
    return (
        Step("lookup", ("lookup",), 120),
        Step("tiers", ("tiers",), 420),
        Step("disk", ("disk",), 240),
        Step("restore", ("restore", "--tokens", "8192"), 420),
        Step("overhead", ("overhead", "--rounds", "2"), 300),
        Step("throttle", ("throttle", "--repetitions", "1"), 420),
        Step("service", ("service",), 180),
        Step("remote", ("remote", "--repetitions", "3"), 300),
        Step("chat", ("chat", "--sessions", "32", "--turns", "3", "--budget", "900"), 1100),
        Step(
            "replay",
            ("replay", str(trace), "--requests", "100", "--budget", "330"),
            480,
            needs=trace,
        ),
        *(_decode(context, share) for context in (16384, 65536) for share in ("0.2", "0.05")),
        Step("generate", ("generate",), 900),
        Step(
            "needle",
            ("needle", "--lengths", "16K,64K", "--samples", "4", "--share", "0.2,0.05"),
            900,
        ),
    )


def quick() -> Sequence[Step]:
    """A check that everything runs: about five minutes. Its figures are not representative."""
    trace = _trace()
    small_chat = ("chat", "--sessions", "4", "--turns", "2", "--variants", "device,host")
    small_replay = ("--requests", "12", "--seconds", "5", "--variants", "host")
    small_engines = ("--model", "small", "--contexts", "4K", "--modes", "offloaded")
    needle = ("--lengths", "1K", "--samples", "2", "--tasks", "single", "--share", "0.5")
    return (
        Step("lookup", ("lookup",), 120),
        Step("tiers", ("tiers", "--rounds", "2", "--requests", "2"), 240),
        Step("service", ("service", "--blocks", "2000", "--repetitions", "1"), 120),
        Step("restore", ("restore", "--tokens", "4096", "--repetitions", "3"), 300),
        Step("remote", ("remote", "--no-engines", "--repetitions", "1"), 180),
        Step("chat", small_chat, 360),
        Step("replay", ("replay", str(trace), *small_replay), 240, needs=trace),
        _decode(8192, "0.2", rounds=3),
        Step("generate", ("generate", *small_engines, "--sequences", "1", "--rounds", "1"), 240),
        Step("needle", ("needle", *needle), 300),
    )


def _decode(context: int, share: str, rounds: int = 10) -> Step:
    words = ("decode", "--context", str(context), "--share", share, "--rounds", str(rounds))
    return Step(f"decode {context >> 10}K {float(share):.0%}", words, 240)


def _trace() -> Path:
    return next((path for path in TRACES if path.is_file()), TRACES[0])


# -- running ---------------------------------------------------------------------------------


def run_all(
    steps: Sequence[Step], out: Path, kind: str, say: Say, add: bool = False, note: str = ""
) -> int:
    """Runs ``steps`` and writes ``out`` after each. Returns the number of failures; a step whose
    ``needs`` is missing is skipped, which is not a failure.

    ``add``: keep the results of other steps in ``out``. ``note``: a remark on this run for readers,
    such as other load on the machine.
    """
    found = _before(out) if add else {}
    results: dict[str, Any] = dict(found.get("results", {}))
    began = time.monotonic()
    failed = 0
    for number, step in enumerate(steps, 1):
        say(f"{number} of {len(steps)}: {step.name} ({_clock(time.monotonic() - began)} so far)")
        result = _run(step, say)
        failed += "error" in result and not _is_absent(step)
        say(f"{step.name}: {result.get('error', 'done')} ({_clock(result['took_s'])})")
        results[step.name] = result
        _write(out, {"kind": kind, "note": note, **_facts(), "results": results})
    say(f"{failed} of {len(steps)} failed, in {_clock(time.monotonic() - began)}: {out}")
    return failed


def _before(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(out.read_text()))
    except (OSError, ValueError):
        return {}


def _facts() -> Mapping[str, object]:
    find_peers()
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "machine": machine(), "versions": versions}


def _write(out: Path, document: Mapping[str, object]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".tmp")
    unfinished.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(out)


def _run(step: Step, say: Say) -> dict[str, Any]:
    """A step's line of JSON, or ``error``; always with ``took_s`` and the load at its start."""
    load = round(os.getloadavg()[0], 2)
    began = time.monotonic()
    if _is_absent(step):
        result: dict[str, Any] = {"error": f"{step.needs} is not there"}
    else:
        result = _child(step, say)
    took = round(time.monotonic() - began, 1)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    program = "kvrecall bench" if step.words[0] in COMMANDS else "python -m kvrecall_lab.bench"
    command = " ".join((program, *step.words))
    return {"command": command, "took_s": took, "load_before": load, "ended": when, **result}


def _is_absent(step: Step) -> bool:
    return step.needs is not None and not step.needs.is_file()


def _child(step: Step, say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as folder:
        child, output = ChildProcess(Path(folder) / "log"), Path(folder) / "output"
        end = time.monotonic() + step.limit_s
        with output.open("wb") as file:
            process = child.launch(
                own("kvrecall_lab.bench.cli", *step.words, "--json"), stdout=file
            )
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
            error = f"not done after {step.limit_s:.0f} s"
        elif process.returncode == 0:
            with suppress(IndexError, ValueError):
                return dict(json.loads(output.read_text().splitlines()[-1]))
        return {"error": error, "said": child.log_tail(_TAIL).splitlines()}


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
