"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing; nothing to do
    WARNING = "warning"  # works, but not as well or as far as it could
    BROKEN = "broken"  # the subject of the check does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. ``found``: what is there, in words; ``cure``: what to do, "" if nothing;
    ``figures``: the same for programs (bytes, versions, flags)."""

    area: str  # installed, engine, machine, pool, model, doctor
    check: str
    state: State
    found: str
    cure: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "figures": dict(self.figures)}
