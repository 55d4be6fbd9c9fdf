"""One check on a device, in its own process: an illegal access poisons a device's context, which
also holds memory that an engine started later needs; and what hangs can be ended.

``python -m kvrecall.gpu_check.part CHECK DEVICE [quick]`` prints lines of JSON, each an
``CheckOutcome``: what it found so far, and last how it ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrecall.gpu_check import CheckOutcome, Finding, Say, SkipError, State, tried
from kvrecall.processes.child import ChildProcess, end_all

_CPU = "cpu"
_CONTEXTS = (32768, 65536, 131072)
_PROMPTS = (8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Here:
    """What a check is told. ``device``: torch's name. ``folder``: for its files."""

    device: str
    quick: bool
    folder: Path
    say: Say

    @property
    def on_cpu(self) -> bool:
        """Whether this is only a trial of the check."""
        return self.device == _CPU


@dataclass(frozen=True, slots=True)
class Part:
    """A check. ``quick_s``: the most it may take with small sizes, about three times what it should
    on an H200 (docs/gpu-check.md); ``whole_s``: with all. ``needs_engine``: a vLLM that kvrecall
    supports."""

    check: Callable[[Here], Finding]
    quick_s: float
    whole_s: float = 900.0
    needs_engine: bool = False


def run_part(
    check: str,
    device: str,
    quick: bool,
    limit_s: float,
    heard: Callable[[CheckOutcome], None],
    module: str = "kvrecall.gpu_check.part",
    kept: Path | None = None,
) -> CheckOutcome:
    """How ``check`` ended; a process that dies, or that had to be ended after ``limit_s``, has
    failed. ``heard``: is told what the check says meanwhile. ``module``: calls ``report``.
    ``kept``: a folder to work in, which is emptied first; None: one that is removed."""
    found: list[CheckOutcome] = []
    with tempfile.TemporaryDirectory(prefix="kvrecall-gpu-check-") as folder:
        if kept is not None:
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            folder = str(kept)
        child, over = ChildProcess(Path(folder) / "log"), threading.Event()
        words = [sys.executable, "-m", module, check, device, *(["quick"] if quick else [])]
        process = child.launch(words, {**os.environ, "TMPDIR": folder}, stdout=subprocess.PIPE)
        reading = (process.stdout, heard, found, over)
        threading.Thread(target=_read, args=reading, daemon=True).start()
        end = time.monotonic() + limit_s
        try:
            while not over.wait(0.1) and process.poll() is None and time.monotonic() < end:
                pass
            is_late = time.monotonic() >= end
            over.wait(1.0)  # a process that it has left may keep its output open
            if not (found or is_late):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
        finally:
            end_all(child.family(), 0.0)
            process.wait()
        if not found:
            said = child.log_tail(1) or "no message"
            note = f"the process ended with {process.returncode}: {said}"
            found = [CheckOutcome(check, State.FAIL, overdue(limit_s) if is_late else note)]
    return found[0]


def _read(
    lines: Iterable[bytes],
    heard: Callable[[CheckOutcome], None],
    found: list[CheckOutcome],
    over: threading.Event,
) -> None:
    """Adds the last of a part's lines to ``found``, if there is one."""
    for line in lines:
        try:
            outcome = CheckOutcome.read(line)
        except (ValueError, KeyError, TypeError):  # a library's
            continue
        if outcome.state is not State.RUNNING:
            found.append(outcome)
            break
        heard(outcome)
    over.set()


def overdue(limit_s: float) -> str:
    """The note of a part that had to be ended."""
    return f"did not end within {limit_s:.0f} s"


# -- the checks -------------------------------------------------------------------------------


def _device(here: Here) -> Finding:
    """Whether there is a device, without which nothing else is checked."""
    import torch

    from kvrecall.engines.vllm.device.driver import accelerators, built_for

    about = {"torch": str(torch.__version__), "built_for": built_for()}
    if here.on_cpu:
        return "a CPU: a trial of the check, whose figures mean nothing", {"device": _CPU, **about}
    found = accelerators()
    if not found:
        raise SkipError(f"torch {torch.__version__} finds no accelerator")
    place = torch.device(here.device) if here.device else torch.accelerator.current_accelerator()
    assert place is not None
    facts = found[place.index or 0]
    about["device"] = str(place)
    figures = {"name": facts.name, "capability": facts.capability}
    return facts.name, {**figures, "memory_gib": round(facts.nbytes / 2**30, 1), **about}


def _copies(here: Here) -> Finding:
    import torch

    from kvrecall.gpu_check import copies

    place = torch.device(here.device)
    blocks = 16 if here.on_cpu else 64 if here.quick else 256
    moved = copies.check_copies(place, copies.Size(blocks, 3, 16, 8, 128))
    copies.check_fetches(place)
    note = f"{moved / 2**20:.0f} MiB there and back in {len(copies.LAYOUTS)} layouts"
    return note, {"bytes": moved}


def _traffic(here: Here) -> Finding:
    import torch

    from kvrecall.gpu_check import traffic
    from kvrecall.gpu_check.copies import LAYOUTS, Size

    size, steps = Size(257, 4, 64, 8, 128), 150 if here.quick else 2000
    if here.on_cpu:
        size, steps = Size(17, 2, 16, 2, 32), 60
    found = {}
    for layout in LAYOUTS:
        found[layout] = traffic.check_traffic(layout, size, torch.device(here.device), steps)
        here.say(f"{layout}: {found[layout]}")
    loaded, preempted = (
        sum(one[what] for one in found.values()) for what in ("loaded", "preempted")
    )
    note = f"{loaded} blocks came back with the sums they left with, in {len(found)} layouts; "
    return f"{note}{preempted} were taken while they were stored", found


def _bandwidth(here: Here) -> Finding:
    """Copies in order and scattered, alternating with a plain copy: the bandwidth of the bus."""
    import torch

    from kvrecall.bench.bandwidth import measure_bandwidth

    nbytes = (512 << 20) if here.quick else (2 << 30)
    pieces = {"64 KiB": 64 << 10, "512 KiB": 512 << 10}  # 16 and 128 tokens of a Llama 8B's layer
    layers = 32
    if here.on_cpu:
        nbytes, layers = 8 << 20, 4
    found = {}
    for name, piece in pieces.items():
        blocks = nbytes // (layers * piece)
        found[name] = measure_bandwidth(blocks, layers, layers * piece, torch.device(here.device))
        here.say(f"pieces of {name}: {found[name]}")
    note = "; ".join(
        f"{name}: restore {one['restore_gb_s']} GB/s ({one['restore_to_plain']} of a plain copy), "
        f"scattered {one['scattered_gb_s']}, store {one['store_gb_s']}"
        for name, one in found.items()
    )
    return note, found


def _retrieval(here: Here) -> Finding:
    import torch

    from kvrecall.gpu_check import attention

    if find_spec("triton") is None:
        raise SkipError("the kernel needs triton, which is not installed here")
    if here.on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run in its interpreter
    place = torch.device(here.device)
    same = attention.check_selection(place, 16 if here.on_cpu else 64 if here.quick else 512)
    here.say("the search agrees with the CPU's")
    attention.check_attention(place)
    return "search and kernels agree with plain torch on the CPU", {"same_blocks": same}


def _tokens(form: str, here: Here) -> Finding:
    from kvrecall.gpu_check import servers

    if here.on_cpu and form != "eager":
        raise SkipError(f"{form} is the same as eager on a CPU, or not there")
    nbytes = (64 << 20) if here.on_cpu else servers.DEVICE_BYTES
    return servers.check_tokens(form, here.folder, here.say, nbytes)


def _first_token(here: Here) -> Finding:
    from kvrecall.gpu_check.first_token import OURS, FirstTokens
    from kvrecall.gpu_check.servers import LARGE, SMALL

    place = here.folder, here.say
    if here.on_cpu:  # which computes such a small model as fast as it loads
        small = FirstTokens(SMALL, (512,), 1, *place, 64 << 20, 256 << 20)
        small.pool = {"load_or_compute": "load"}
        return small.measure((OURS,))
    contexts, repetitions = (_PROMPTS[:1], 2) if here.quick else (_PROMPTS, 3)
    large = FirstTokens(LARGE, contexts, repetitions, *place)
    return large.measure((OURS, "OffloadingConnector"))


def _retrieval_tokens(here: Here) -> Finding:
    from kvrecall.gpu_check import servers

    nbytes = (64 << 20) if here.on_cpu else servers.DEVICE_BYTES
    return servers.check_retrieval_tokens(here.device, here.folder, here.say, nbytes)


def _decode_engine(here: Here) -> Finding:
    from kvrecall.gpu_check.decode import measure_decode
    from kvrecall.gpu_check.servers import LARGE, OPEN, SCALED, SMALL

    place = here.device, here.folder, here.say
    if here.on_cpu:
        return measure_decode(((1, 2048), (2, 2048)), SMALL, *place, SCALED)
    contexts = _CONTEXTS[: 1 if here.quick else None]
    return measure_decode([(1, context) for context in contexts], LARGE, *place, OPEN)


FORMS = ("piecewise", "eager", "graphs", "fp8")

PARTS: Mapping[str, Part] = {
    "device": Part(_device, 60),
    "copies": Part(_copies, 45),
    "traffic": Part(_traffic, 60),
    "bandwidth": Part(_bandwidth, 60),
    "retrieval": Part(_retrieval, 75),
    **{f"tokens-{form}": Part(partial(_tokens, form), 180, needs_engine=True) for form in FORMS},
    "retrieval-tokens": Part(_retrieval_tokens, 180, needs_engine=True),
    "first-token": Part(_first_token, 150, 1800, needs_engine=True),
    "decode-engine": Part(_decode_engine, 150, needs_engine=True),
}
"""In the order in which they run."""

NOT_QUICK = frozenset({"tokens-eager", "tokens-graphs", "tokens-fp8"})
"""``--quick`` runs these only if ``--only`` names them."""


def report(parts: Mapping[str, Part], check: str, device: str, *words: str) -> None:
    """Runs one of these, and prints its lines."""

    def say(text: str, **figures: Any) -> None:
        print(CheckOutcome(check, State.RUNNING, text, figures).line(), flush=True)

    here = Here(device, "quick" in words, Path(tempfile.gettempdir()), say)
    print(tried(check, say, partial(parts[check].check, here)).line(), flush=True)


if __name__ == "__main__":
    report(PARTS, *sys.argv[1:])
