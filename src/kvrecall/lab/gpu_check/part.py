"""One check on a device, in its own process: an illegal access poisons a CUDA context, and a
context holds memory that an engine started later needs.

``python -m kvrecall.lab.gpu_check.part CHECK DEVICE [QUICK]`` ends with one line: the ``Outcome``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

from kvrecall.lab.gpu_check.outcome import Finding, Outcome, SkipError, State, tried

_LIMIT_S = 900.0
_CONTEXTS = (32768, 131072, 524288)


def run_part(check: str, device: str, quick: bool = False) -> Outcome:
    """The outcome of ``check``; a process that dies or hangs is a failure of it."""
    command = [sys.executable, "-m", "kvrecall.lab.gpu_check.part", check, device]
    try:
        done = subprocess.run(
            [*command, "quick"] if quick else command,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(check, State.FAIL, f"no end after {_LIMIT_S:.0f} s")
    lines = done.stdout.strip().splitlines()
    try:
        return Outcome.read(lines[-1])
    except (ValueError, KeyError, IndexError):
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return Outcome(check, State.FAIL, f"the process ended with {done.returncode}: {said}")


def _device(_: str, quick: bool) -> Finding:
    """Whether there is a device, without which nothing else is checked."""
    import torch

    if not torch.cuda.is_available():
        raise SkipError(f"torch {torch.__version__} finds no CUDA device")
    facts = torch.cuda.get_device_properties(0)
    return facts.name, {
        "name": facts.name,
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "capability": f"{facts.major}.{facts.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _copies(device: str, quick: bool) -> Finding:
    import torch

    from kvrecall.lab.gpu_check import copies

    place = torch.device(device)
    moved = copies.check_copies(place, blocks=32 if quick else 256)
    copies.check_order(place)
    if place.type != "cpu":  # where Triton's kernels are compiled
        copies.check_fetches(place)
    note = f"{moved / 2**20:.0f} MiB there and back in {len(copies.LAYOUTS)} layouts, in order"
    return note, {"bytes": moved}


def _bandwidth(_: str, quick: bool) -> Finding:
    """Copies in order and scattered, alternating with a plain copy: the bandwidth of the bus."""
    from kvrecall.lab.bench.restore import measure_bandwidth

    figures = measure_bandwidth(*((8, 4, 1 << 20) if quick else (128, 32, 16 << 20)))
    note = (
        f"restore {figures['restore_gb_s']} GB/s, scattered {figures['scattered_gb_s']}, "
        f"plain copy {figures['plain_copy_gb_s']}: {figures['restore_to_plain']} of the bus"
    )
    return note, figures


def _retrieval(device: str, quick: bool) -> Finding:
    import torch

    from kvrecall.lab.gpu_check import attention

    place = torch.device(device)
    same = attention.check_selection(place, 64 if quick else 512)
    if place.type == "cpu":
        note = "the search only: the kernel needs a GPU (or Triton's interpreter)"
    else:
        attention.check_attention(place)
        note = "search and kernels agree with plain torch on the CPU"
    return note, {"same_blocks": same}


def _decode(device: str, quick: bool) -> Finding:
    import torch

    from kvrecall.lab.gpu_check import attention

    if device == "cpu":
        raise SkipError("the kernel needs a GPU")
    place = torch.device(device)
    figures = {str(c): attention.decode_times(place, c) for c in _CONTEXTS[: 1 if quick else None]}
    note = "; ".join(
        f"{int(context) // 1024}K: dense {one['dense_ms']} ms, retrieval {one['retrieval_ms']} ms"
        for context, one in figures.items()
    )
    return f"attention of a token in one layer, {note}", figures


PARTS: Mapping[str, Callable[[str, bool], Finding]] = {
    "device": _device,
    "copies": _copies,
    "bandwidth": _bandwidth,
    "retrieval": _retrieval,
    "decode": _decode,
}


def _main(check: str, device: str, *words: str) -> None:
    part = partial(PARTS[check], device, "quick" in words)
    print(tried(check, lambda _: None, part).line())


if __name__ == "__main__":
    _main(*sys.argv[1:])
