"""One check on a device, in its own process: an illegal access poisons a device's context, which
also holds memory that an engine started later needs; and what hangs can be ended.

``python -m kvrecall.gpu_check.part CHECK DEVICE [quick]`` prints lines of JSON, each an
``CheckOutcome``: what it found so far, and last how it ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from kvrecall.gpu_check import CheckOutcome, Finding, SkipError, State, tried
from kvrecall.processes.child import ChildProcess, end_all

_CPU = "cpu"
_CONTEXTS: Sequence[int] = (32768, 131072, 524288)
_PROMPTS = (8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Here:
    """What a check is told. ``device``: torch's name. ``say``: reports what it found so far."""

    device: str
    quick: bool
    say: Callable[[str], None]

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
    check: str, device: str, quick: bool, limit_s: float, heard: Callable[[CheckOutcome], None]
) -> CheckOutcome:
    """How ``check`` ended; a process that dies, or that had to be ended after ``limit_s``, has
    failed. ``heard``: is told what the check says meanwhile."""
    words = [sys.executable, "-m", "kvrecall.gpu_check.part", check, device]
    late = threading.Event()
    with tempfile.TemporaryDirectory(prefix="kvrecall-gpu-check-") as folder:
        child = ChildProcess(Path(folder) / "log")
        environment = {**os.environ, "TMPDIR": folder}
        words += ["quick"] if quick else []
        process = child.launch(words, environment, stdout=subprocess.PIPE)

        def end() -> None:
            late.set()
            end_all(child.family(), 0.0)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            assert process.stdout is not None
            last = _last(process.stdout, heard)
            if last is None and late.is_set():
                return CheckOutcome(check, State.FAIL, overdue(limit_s))
            if last is None:
                status, said = process.wait(), child.log_tail(1) or "no message"
                last = CheckOutcome(check, State.FAIL, f"the process ended with {status}: {said}")
            return last
        finally:
            timer.cancel()
            end_all(child.family(), 0.0)
            process.wait()


def _last(lines: Iterable[bytes], heard: Callable[[CheckOutcome], None]) -> CheckOutcome | None:
    """The last of a part's lines; None if it is missing."""
    for line in lines:
        try:
            outcome = CheckOutcome.read(line)
        except (ValueError, KeyError, TypeError):  # a library's
            continue
        if outcome.state is not State.RUNNING:
            return outcome
        heard(outcome)
    return None


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
    return servers.check_tokens(form, here.say, nbytes)


def _first_token(here: Here) -> Finding:
    from kvrecall.gpu_check import servers

    if here.on_cpu:
        return servers.measure_first_token((512,), servers.SMALL, 1, here.say, ("kvrecall",))
    prompts, repetitions = (_PROMPTS[:1], 2) if here.quick else (_PROMPTS, 5)
    return servers.measure_first_token(prompts, servers.LARGE, repetitions, here.say)


def _retrieval_tokens(here: Here) -> Finding:
    from kvrecall.gpu_check import servers

    nbytes = (64 << 20) if here.on_cpu else servers.DEVICE_BYTES
    return servers.check_retrieval_tokens(here.device, here.say, nbytes)


def _decode_engine(here: Here) -> Finding:
    from kvrecall.gpu_check import servers

    if here.on_cpu:
        small = servers.SMALL, here.device, here.say, servers.SCALED
        return servers.measure_decode((2048,), *small)
    contexts = _CONTEXTS[: 1 if here.quick else 2]
    return servers.measure_decode(contexts, servers.LARGE, here.device, here.say)


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


def _main(check: str, device: str, *words: str) -> None:
    def say(text: str) -> None:
        print(CheckOutcome(check, State.RUNNING, text).line(), flush=True)

    here = Here(device, "quick" in words, say)
    print(tried(check, say, partial(PARTS[check].check, here)).line(), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
