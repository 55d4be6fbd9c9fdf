"""Which benchmarks belong to a run, with which sizes, and how long each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TRACE = "conversation_trace.jsonl"
TRACES = (Path("var") / _TRACE, Path("../shared/traces") / _TRACE)
"""Where Mooncake's recorded trace (FAST'25, github.com/kvcache-ai/Mooncake) is looked for; it is no
part of the repository, and without it there is no replay."""


@dataclass(frozen=True, slots=True)
class Step:
    """One benchmark: ``kvrecall bench WORDS``, at most ``limit_s`` seconds.

    ``needs``: a file without which it is left out.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    needs: Path | None = None


def full() -> Sequence[Step]:
    """For figures: some 38 minutes on two cores."""
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
        Step(
            "needle",
            ("needle", "--lengths", "2K,8K", "--samples", "6", "--share", "0.2,0.05"),
            480,
        ),
    )


def quick() -> Sequence[Step]:
    """To see that everything runs: some five minutes. Its figures mean little."""
    trace = _trace()
    small_chat = ("chat", "--sessions", "4", "--turns", "2", "--variants", "device,host")
    small_replay = ("--requests", "12", "--seconds", "5", "--variants", "host")
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
        Step("needle", ("needle", *needle), 300),
    )


def _decode(context: int, share: str, rounds: int = 10) -> Step:
    words = ("decode", "--context", str(context), "--share", share, "--rounds", str(rounds))
    return Step(f"decode {context >> 10}K {float(share):.0%}", words, 240)


def _trace() -> Path:
    return next((path for path in TRACES if path.is_file()), TRACES[0])
