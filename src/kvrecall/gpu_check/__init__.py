"""``kvrecall gpu-check``: correctness on a GPU, and absolute figures, in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from kvrecall.errors import KvrecallError


class State(StrEnum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"  # cannot run here, or there was no time; the note says which
    RUNNING = "running"  # the note says what it has found so far


class CheckError(KvrecallError):
    """A check failed; the message says how."""


class SkipError(Exception):
    """The check cannot run here; the message says why."""


Say = Callable[..., None]
"""Takes a text, and figures by name: what a check has found so far."""

Finding = tuple[str, Mapping[str, Any]]
"""The result of a passed check: a note, and figures."""


_REFUSAL = re.compile(r"kvrecall\.errors\.\w+: (.+)")
_ERROR = re.compile(r"\b\w+Error: (.+)")


def reason(text: str) -> str:
    """The most informative line of an error's text: kvrecall's own error if printed, else the last
    error of a traceback, else the first line, or the last if the first only announces it."""
    for pattern, which in ((_REFUSAL, 0), (_ERROR, -1)):
        found = pattern.findall(text)
        if found:
            return str(found[which]).strip()
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1] if lines[0].endswith(":") else lines[0]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """``note``: one line for people. ``figures`` go into the line of JSON."""

    check: str
    state: State
    note: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, line: str | bytes) -> CheckOutcome:
        """From ``line()``. Raises ValueError."""
        raw = json.loads(line)
        return cls(raw["check"], State(raw["state"]), raw["note"], raw["figures"])


def tried(name: str, progress: Callable[[str], None], check: Callable[[], Finding]) -> CheckOutcome:
    """The outcome of ``check``. A failing device or server is a failed check; the whole error goes
    to ``progress``."""
    progress(f"{name} ...")
    try:
        note, figures = check()
    except SkipError as error:
        return CheckOutcome(name, State.SKIP, str(error))
    except ModuleNotFoundError as error:
        return CheckOutcome(name, State.SKIP, f"{error.name} is not installed here")
    except (KvrecallError, RuntimeError, MemoryError, httpx.HTTPError) as error:
        said = str(error) or type(error).__name__
        progress(said)
        return CheckOutcome(name, State.FAIL, reason(said))
    return CheckOutcome(name, State.PASS, note, figures)
