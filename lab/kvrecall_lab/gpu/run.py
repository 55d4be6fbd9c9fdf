"""Runs parts one after the other within a time, and writes what each finds at once."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from kvrecall.bench.report import machine
from kvrecall.gpu_check import CheckOutcome, State
from kvrecall.gpu_check.part import Part, run_part
from kvrecall.processes.child import end_all
from kvrecall_lab.gpu import pack, parts
from kvrecall_lab.gpu.unpack import CACHE, SUFFIX

RESULTS = "results.jsonl"
LOGS = "logs.txt"
"""What the servers said, part by part."""

RETURNED_BYTES = 16 << 20
"""The most of a file that comes back from such a machine."""

_LOG_BYTES = 256 << 10
"""The most of a server's log that is kept, from its end."""

RETURNED_FILES = 5
"""Archives of caches among what comes back."""

_CACHES_S = 20.0  # to pack caches, after the last part
_LEAST_S = 15.0  # a part is not begun with less
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER


def run(
    names: Sequence[str],
    out: Path,
    home: Path,
    limit_s: float,
    tiny: bool,
    module: str = parts.__name__,
    known: Any = parts.PARTS,
) -> bool:
    """Runs these parts, at most ``limit_s`` together, and packs the caches that they filled.
    Appends lines of JSON to ``out/results.jsonl``. ``home``: the unpacked kit's folder: caches are
    kept in it. ``tiny``: on a CPU, at toy size. Returns whether no part failed.

    When a part has ended, in whatever way, so have all processes that it started: two engines never
    run at once.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_s - _CACHES_S
    ctypes.CDLL(None).prctl(_ADOPT, 1)  # processes whose parents ended become this one's children
    _use_caches(home / CACHE)
    is_good = True
    with (out / RESULTS).open("a") as file:
        begin = time.monotonic()

        def write(facts: dict[str, Any]) -> None:
            line = {"at_s": round(time.monotonic() - begin, 1), **facts}
            text = json.dumps(line, separators=(",", ":"), default=str)
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

        write({"check": "start", "parts": names, "tiny": tiny, **machine()})
        for name in names:
            part: Part = known[name]
            left = end - time.monotonic()
            if left < _LEAST_S:
                write(asdict(CheckOutcome(name, State.SKIP, f"{left:.0f} s were left")))
                continue
            outcome = run_part(
                name,
                "cpu" if tiny else "cuda",
                tiny or name in parts.SMALL_SIZES,
                left if tiny else min(left, part.whole_s),
                lambda found: write(asdict(found)),
                module,
                home / "work",
            )
            end_all(psutil.Process().children(recursive=True), 0.0)
            keep_logs(name, home / "work", out / LOGS)
            is_good &= outcome.state is not State.FAIL
            write(asdict(outcome))
        bring_back(home / CACHE, out, lambda text: write({"check": "caches", "note": text}))
    return is_good


def keep_logs(part: str, folder: Path, kept: Path) -> None:
    """Appends the ends of a part's logs to ``kept``."""
    for log in sorted(folder.rglob("*.log")):
        with kept.open("ab") as file:
            file.write(f"== {part}: {log.relative_to(folder)}\n".encode())
            file.write(log.read_bytes()[-_LOG_BYTES:])


def _use_caches(cache: Path) -> None:
    """Kernels that Triton, and functions that vLLM and PyTorch compile are kept there. Engines do
    not begin as copies of a process that has used the device."""
    for name, variable in (
        ("triton", "TRITON_CACHE_DIR"),
        ("vllm", "VLLM_CACHE_ROOT"),
        ("inductor", "TORCHINDUCTOR_CACHE_DIR"),
    ):
        os.environ[variable] = str(cache / name)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # FlashInfer is not in the kit


def bring_back(cache: Path, out: Path, say: Callable[[str], None]) -> None:
    """Packs the caches into archives; removes, and names, those that would not come back."""
    for old in out.glob(f"{CACHE}-*{SUFFIX}"):
        old.unlink()
    pack.archive(cache, out, CACHE, say, preset=2)
    for number, path in enumerate(sorted(out.glob(f"{CACHE}-*{SUFFIX}"))):
        if number >= RETURNED_FILES or path.stat().st_size > RETURNED_BYTES:
            say(f"{path.name} left out: {path.stat().st_size >> 20} MiB, archive {number + 1}")
            path.unlink()
