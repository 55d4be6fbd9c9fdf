"""What both halves of a request work with."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.router.chooser import Chooser
from kvrecall.router.metrics import RouterMetrics
from kvrecall.router.prefixes import PrefixMap
from kvrecall.router.prober import Prober
from kvrecall.router.settings import RouterSettings
from kvrecall.router.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Parts:
    """One router's settings and parts, shared by its ``Prefiller`` and its ``Relay``; the router
    owns them."""

    settings: RouterSettings
    chooser: Chooser
    prefixes: PrefixMap
    upstream: Upstream
    prober: Prober
    metrics: RouterMetrics
